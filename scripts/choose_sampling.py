"""Which temperature and threshold give a round of self-training most to learn from (B-STaR, arXiv 2412.17256).

python scripts/choose_sampling.py tiny_lm sums_train --limit 8 --samples 8 --temperatures 0.7 1.0 --tokens 5

Samples texts of a few prompts at every temperature, and keeps those whose reward is above a threshold. A prompt's
balance score is min(n / wanted, 1) n / kept, of n right ones among those that are kept: how many there are,
exploration, times how well the reward tells them, exploitation. Prints the mean score of each temperature at its best
threshold, the best first, for the next `flowalign rejection-sampling`. The score is that of the authors'
determine_hyper.py; they try numbers of samples too.
"""

import argparse
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.config.rewards import build_reward
from flowalign.config.sections import Weighted
from flowalign.data import Prompts
from flowalign.data.prompts import shipped
from rewards import Reward, score
from rewards.text.model import CausalModel, Pictured


def balance(right: Tensor, kept: Tensor, wanted: int) -> float:
    """Mean balance score of prompts; those without a text that is kept count 0.

    Args:
        right: [Q, N] bool.
        kept: [Q, N] bool.
    """
    good, count = (right & kept).sum(1).float(), kept.sum(1).float()
    return ((good / wanted).clamp(max=1) * good / count.clamp(min=1)).mean().item()


def reward(text: str) -> Reward:
    """A reward from its name, or from its settings as JSON."""
    settings = json.loads(text) if text.startswith("{") else {"name": text}
    made: Reward = build_reward([Weighted(**settings)])
    return made


def best_threshold(right: Tensor, value: Tensor, wanted: int) -> tuple[float, float]:
    """The threshold with the highest score, and that score; texts above it are kept."""
    below = value.min().item() - 1
    thresholds = [below, *value.unique().tolist()[:-1]]
    scores = [balance(right, value > threshold, wanted) for threshold in thresholds]
    best = max(range(len(scores)), key=scores.__getitem__)
    return thresholds[best], scores[best]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name of the model")
    parser.add_argument("prompts", help="a file or a shipped list")
    parser.add_argument("--outcome", default="exact_match", help="verifier of right texts, a name or JSON")
    parser.add_argument("--reward", help="what texts are kept by, a name or JSON; default the verifier")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.1])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--wanted", type=int, default=8, help="right texts of a prompt that are enough")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=64)
    options = parser.parse_args(arguments)
    prompts = Prompts.read(options.prompts)
    texts, records = prompts.texts[: options.limit], prompts.metadata[: options.limit]
    model, outcome = CausalModel.load(str(shipped(options.model))), reward(options.outcome)
    kept_by = reward(options.reward) if options.reward else outcome
    contexts = [model.begin(prompt, record) for prompt, record in zip(texts, records, strict=True)]
    read = [context for context in contexts if not isinstance(context, Pictured)]
    found = []
    for temperature in options.temperatures:
        right, value = [], []
        for sample in range(options.samples):
            made = model.continued(read, options.tokens, temperature, sample)
            right.append(score(outcome, made, texts, records).value >= 0.5)
            value.append(score(kept_by, made, texts, records).value)
        threshold, balanced = best_threshold(torch.stack(right, 1), torch.stack(value, 1), options.wanted)
        found.append((balanced, temperature, threshold))
    for balanced, temperature, threshold in sorted(found, reverse=True):
        print(f"balance {balanced:.4f}  temperature {temperature:g}  rewards above {threshold:g}")


if __name__ == "__main__":
    main()
