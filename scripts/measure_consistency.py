"""Whether a reward of texts tells answers of nearly the same prompts apart (Contrast Instructions, arXiv 2309.16155).

    python scripts/measure_consistency.py sums_heldout exact_match
    python scripts/measure_consistency.py questions.jsonl text_score --settings '{model: runs/reward}' --answer chosen

A line has a prompt and a right answer of its own. Each is paired with the line whose prompt shares most words with it,
and has another answer. Prints the share of lines whose own answer earns more than the other's under the prompt, and the
share whose prompt gives the answer more than the other prompt does; a coin has 50%.
"""

from typing import Annotated

import typer
import yaml

from flowalign import registry
from flowalign.data import Prompts
from flowalign.data.audit import normalised, similar
from flowalign.errors import ConfigError
from rewards import Reward, as_reward, score


def nearest(prompts: list[str], answers: list[str], least: float) -> list[tuple[int, int]]:
    """Each line that has one, with the other line of another answer whose prompt is most like its own."""
    words = [normalised(prompt) for prompt in prompts]
    best: dict[int, tuple[float, int]] = {}
    for line, other, alike in similar(words, words, least):
        if words[line] != words[other] and answers[line] != answers[other]:
            # of equals the earlier one
            best[line] = max(best.get(line, (0.0, 0)), (alike, -other))
    return [(line, -other) for line, (_, other) in sorted(best.items())]


def consistency(
    reward: Reward, lines: Prompts, answers: list[str], pairs: list[tuple[int, int]]
) -> tuple[float, float]:
    """Shares of pairs: whose own answer earns more under the prompt, and whose prompt gives the answer more."""

    def earned(prompt_of: list[int], answer_of: list[int]) -> list[float]:
        prompts, metadata = [lines.texts[i] for i in prompt_of], [lines.metadata[i] for i in prompt_of]
        return score(reward, [answers[i] for i in answer_of], prompts, metadata).value.tolist()

    mine, theirs = [line for line, _ in pairs], [other for _, other in pairs]
    own, other_answer, other_prompt = earned(mine, mine), earned(mine, theirs), earned(theirs, mine)
    shares = [[a > b for a, b in zip(own, others, strict=True)] for others in (other_answer, other_prompt)]
    return sum(shares[0]) / len(pairs), sum(shares[1]) / len(pairs)


def main(
    prompts: str,
    reward: str,
    settings: Annotated[str, typer.Option(help="The reward's settings, as YAML.")] = "{}",
    answer: Annotated[str, typer.Option(help="Key of the answer in a line.")] = "answer",
    least: Annotated[float, typer.Option(min=0, max=1, help="Share of words that two prompts have in common.")] = 0.3,
) -> None:
    lines = Prompts.read(prompts)
    missing = [text for text, record in zip(lines.texts, lines.metadata, strict=True) if answer not in record]
    if missing:
        raise ConfigError(f"{prompts}: no '{answer}' with the prompt {missing[0][:60]!r}; --answer names another key")
    answers = [str(record[answer]) for record in lines.metadata]
    pairs = nearest(lines.texts, answers, least)
    if not pairs:
        raise ConfigError(f"{prompts}: no two prompts share {least:.0%} of their words; a lower --least works")
    asked = as_reward(registry.build("rewards", reward, yaml.safe_load(settings), "reward"))
    by_answer, by_prompt = consistency(asked, lines, answers, pairs)
    print(f"{len(pairs)} of {len(lines)} prompts have a near one")
    print(f"the own answer earns more: {by_answer:.1%}\nthe own prompt gives more: {by_prompt:.1%}")


if __name__ == "__main__":
    typer.run(main)
