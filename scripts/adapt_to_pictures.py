"""Adapt a model to each picture alone before it answers, by CLIP's reward (RLCF, arXiv 2305.18010).

    python scripts/adapt_to_pictures.py CONFIG prompts.jsonl --output runs/adapted.jsonl [KEY=VALUE ...]

CONFIG names a model that sees pictures, the reward (`picture_match`) and how the evaluation answers. For each prompt
the model samples texts, and REINFORCE with their mean reward as the baseline updates it for a few steps; then it
answers, and its weights are what they were. Writes the answer before and after with their rewards.

The authors take captions of a beam search; here they are samples at `rollout.temperature`.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from flowalign.config import Config, load
from flowalign.config.rewards import build_reward
from flowalign.core.record import masked_sum
from flowalign.data import Prompts
from flowalign.policies.base import best_device
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.runs.files import write_atomically
from flowalign.training.building import build_policy, make_trainable
from rewards import Reward, score


@contextmanager
def restored(policy: LanguagePolicy) -> Iterator[None]:
    """Context after which the trained weights are what they were."""
    start = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in policy.trainable().items():
                parameter.copy_(start[name])


def adapt(
    policy: LanguagePolicy,
    reward: Reward,
    prompt: str,
    record: Mapping[str, Any],
    sampling: Mapping[str, Any],
    steps: int = 4,
    samples: int = 8,
    learning_rate: float = 1e-4,
    seed: int = 0,
) -> list[float]:
    """Update the policy for one prompt; the mean reward of each step's samples."""
    optimizer = torch.optim.AdamW(policy.trainable().values(), learning_rate, weight_decay=0.0)
    means = []
    for step in range(steps):
        seeds = [seed + step * samples + i for i in range(samples)]
        rollout = policy.sample([prompt] * samples, seeds, metadata=[dict(record)] * samples, **sampling)
        value = score(reward, policy.decode(rollout), [prompt] * samples, [dict(record)] * samples).value
        advantage = (value - value.mean()).to(policy.device)
        log_prob, _ = policy.log_probs(rollout, torch.arange(samples, device=policy.device))
        optimizer.zero_grad()
        (-advantage * masked_sum(log_prob, rollout.mask)).mean().backward()
        optimizer.step()
        means.append(value.mean().item())
    return means


def adapted(config: Config, prompts: Prompts, **settings: Any) -> Iterator[dict[str, Any]]:
    """The answers to each prompt before and after, and their rewards."""
    policy, reward = build_policy(config, best_device()), build_reward(config.rewards)
    assert isinstance(policy, LanguagePolicy), "the configuration is of a language model"
    make_trainable(policy, config.model, keep_reference=False)
    policy.bind(reward)
    answering, sampling = config.evaluation.arguments(), config.rollout.arguments()

    def answer(prompt: str, record: dict[str, Any]) -> tuple[str, float]:
        (text,) = policy.decode(policy.sample([prompt], [0], metadata=[record], **answering))
        return text, score(reward, [text], [prompt], [record]).value.item()

    for prompt, record in zip(tqdm(prompts.texts, desc="prompts"), prompts.metadata, strict=True):
        before, old = answer(prompt, record)
        with restored(policy):
            adapt(policy, reward, prompt, record, sampling, **settings)
            after, new = answer(prompt, record)
        yield {"prompt": prompt, **record, "before": before, "after": after, "reward_before": old, "reward_after": new}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("prompts")
    parser.add_argument("--output", type=Path, default=Path("runs/adapted.jsonl"))
    parser.add_argument("--steps", type=int, default=4, help="updates for each prompt")
    parser.add_argument("--samples", type=int, default=8, help="texts of an update")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    settings = {"steps": given.steps, "samples": given.samples, "learning_rate": given.learning_rate}
    lines = list(adapted(load(given.config, given.overrides), Prompts.read(given.prompts), **settings))
    write_atomically(given.output, "".join(json.dumps(line) + "\n" for line in lines))
    rise = sum(line["reward_after"] - line["reward_before"] for line in lines) / len(lines)
    print(f"{given.output}: the mean reward changed by {rise:+.4f} over {len(lines)} prompts")
