"""Search the steps of texts: how hard each prompt is, right texts to imitate, and labels of steps for a reward model.

python scripts/label_steps.py tiny_lm sums_train --iterations 8 --limit 20 --output labels

Writes prompts.jsonl (the prompts with `iterations`, for data.difficulty: {key: iterations}), traces.jsonl (for
text_sft) and steps.jsonl (for text_kto and text_outcome). With --judge only labels that a judge shares are left.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from flowalign.config.rewards import build_reward
from flowalign.config.sections import Weighted
from flowalign.data import Prompts
from flowalign.data.prompts import shipped
from rewards import Reward, score
from rewards.text.model import CausalModel
from rewards.text.tree import TreeSearch, step_lines


def reward(text: str) -> Reward:
    """A reward from its name, or from its settings as JSON."""
    settings = json.loads(text) if text.startswith("{") else {"name": text}
    made: Reward = build_reward([Weighted(**settings)])
    return made


def label(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Lines of each file."""
    prompts = Prompts.read(options.prompts)
    search = TreeSearch(
        CausalModel.load(str(shipped(options.model))),
        reward(options.outcome),
        reward(options.check) if options.check else None,
        options.width,
        options.tokens,
        separator=options.separator,
    )
    judge = reward(options.judge) if options.judge else None
    found: dict[str, list[dict[str, Any]]] = {"prompts": [], "traces": [], "steps": []}
    for number in range(min(options.limit or len(prompts), len(prompts))):
        prompt, record = prompts.texts[number], prompts.metadata[number]
        tree = search(prompt, record, options.iterations, number)
        found["prompts"].append({"prompt": prompt, **record, "iterations": tree.iterations})
        found["traces"] += [{"prompt": prompt, "completion": text} for text in tree.right]
        verdicts = None
        if judge is not None:
            texts = [node.text for node in tree.root]
            values = score(judge, texts, [prompt] * len(texts), [record] * len(texts)).value.tolist()
            verdicts = {text: value >= 0.5 for text, value in zip(texts, values, strict=True)}
        found["steps"] += step_lines(tree, prompt, verdicts=verdicts)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name of the model that is searched")
    parser.add_argument("prompts", help="a file or a shipped list")
    parser.add_argument("--outcome", default="exact_match", help="verifier of finished texts, a name or JSON")
    parser.add_argument("--check", help="a tool's verdict on the text so far, a reward by name or as JSON")
    parser.add_argument("--judge", help="a judge of the text so far, a reward by name or as JSON")
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--width", type=int, default=3, help="steps that are tried from one beginning")
    parser.add_argument("--tokens", type=int, default=256, help="largest number of tokens that finish a text")
    parser.add_argument("--separator", default=r"\n+", help="regular expression of what ends a step")
    parser.add_argument("--limit", type=int, help="use the first so many prompts")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, lines in label(options).items():
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{len(lines)} lines in {options.output / name}.jsonl")


if __name__ == "__main__":
    main()
