"""What judges are worth: the share of held-out pairs whose chosen picture they prefer.

    python scripts/measure_judge.py runs/heldout/preferences.jsonl shapes_show tiny_vlm runs/judge [JUDGE ...]

Pairs are compared as Pref-GRPO does with the template: in both orders where it shows two pictures, by the scores of
each where it shows one. A tie counts half.
"""

import argparse
from pathlib import Path

import PIL.Image

from flowalign.data import Preferences, shipped
from rewards.judges import JudgeReward, Local, PairwiseJudgeReward, load_template
from rewards.pairwise import as_judge


def measure(preferences: str, template: str, judges: list[str], max_tokens: int = 64) -> dict[str, float]:
    """The share of each judge: a shipped model, a model's folder, or a run's."""
    pairs = Preferences.read(preferences)
    chosen, rejected = ([PIL.Image.open(record[key]) for record in pairs.metadata] for key in ("chosen", "rejected"))
    kind = PairwiseJudgeReward if load_template(template).pairwise else JudgeReward
    shares = {}
    for name in judges:
        folder = Path(name, "model")
        local = Local(str(folder if folder.is_dir() else shipped(name)), batch_size=64)
        judge = as_judge(kind(template, local, max_tokens=max_tokens))
        value = judge.compare(chosen, rejected, pairs.texts, pairs.metadata).value
        shares[name] = ((value > 0.5).float() + (value == 0.5) / 2).mean().item()
        print(f"{name}: right about {shares[name]:.1%} of {len(pairs)} pairs", flush=True)
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("preferences", help="as scripts/label_pairs.py and the gallery write them")
    parser.add_argument("template")
    parser.add_argument("judges", nargs="+", metavar="JUDGE")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a reply, where the template has it written")
    arguments = parser.parse_args()
    measure(arguments.preferences, arguments.template, arguments.judges, arguments.max_tokens)
