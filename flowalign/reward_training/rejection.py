"""The stages before reinforcement (arXiv 2505.03318): imitating demonstrations, then the model's right replies."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.config.language import TextConfig
from flowalign.config.rewards import build_reward
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.policies.base import best_device
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import demonstrated
from flowalign.reward_training.supervised import fit, new_folder
from flowalign.training.building import build_policy
from rewards import score
from samplers import derive_seed

KEY = "demonstration"


def cold_start(
    config: TextConfig, output: Path, epochs: int, learning_rate: float, progress: bool = True
) -> dict[str, Any]:
    """UnifiedReward-Think's first stage, for any prompts with a `demonstration` in their metadata: imitate it.

    Every weight is trained.

    Args:
        config: configuration of the GRPO run that follows: its model, data and seed are used.
        output: a new folder, which gets `model/` and `cold_start.json`.
        learning_rate: first learning rate of AdamW; it falls linearly to 0.

    Returns:
        the content of cold_start.json.
    """
    policy, prompts = _start(config)
    missing = [text for text, record in zip(prompts.texts, prompts.metadata, strict=True) if KEY not in record]
    if missing:
        raise ConfigError(f"{config.data.prompts}: the prompt {missing[0][:60]!r} has no '{KEY}' to imitate")
    texts = [str(record[KEY]) for record in prompts.metadata]
    rollout = demonstrated(policy, prompts.texts, texts, prompts.metadata)
    settings: dict[str, Any] = {"epochs": epochs, "learning_rate": learning_rate}
    losses = _imitate(config, policy, rollout, torch.arange(len(texts)), **settings, progress=progress)
    last_pass = losses[-len(losses) // epochs :]
    report = {"demonstrations": len(texts), "loss": fmean(last_pass), **settings, "seed": config.training.seed}
    with new_folder(output, "cold_start.json", report) as folder:
        policy.save(folder / "model")
    return report


def rejection_sampling(
    config: TextConfig, output: Path, samples: int, epochs: int, learning_rate: float, progress: bool = True
) -> dict[str, Any]:
    """UnifiedReward-Think's second stage, for any prompts whose replies are right or wrong.

    The model replies `samples` times to each prompt. It is trained by likelihood on one right reply of every prompt
    that has one; the other prompts are left for the third stage, GRPO. Prompts that share a `pair` in their metadata
    count only if each of them has a right reply: a judge that always names the first picture is right about no pair,
    and does not learn from it. Every weight is trained.

    Args:
        config: configuration of the GRPO run that follows: its model, data, rewards, rollout and seed are used. A reply
            is right if its reward is at least 1.
        output: a new folder, which gets `model/`, `wrong.jsonl` and `rejection_sampling.json`.
        learning_rate: first learning rate of AdamW; it falls linearly to 0.

    Returns:
        the content of rejection_sampling.json.
    """
    policy, prompts = _start(config)
    rollout, value = _replies(config, policy, prompts, samples)
    right = value >= 1 - 1e-6
    pairs = [str(record.get("pair", f"own {i}")) for i, record in enumerate(prompts.metadata)]
    _, pair = np.unique(pairs, return_inverse=True)
    group = torch.from_numpy(pair)
    # every prompt of a pair must have a right reply
    known = torch.ones(len(prompts)).scatter_reduce(0, group, right.any(1).float(), "amin").bool()[group]
    wrong = (~known).nonzero()[:, 0].tolist()
    if not known.any():
        raise ConfigError(f"{config.data.prompts}: the model is right about no prompt, so there is nothing to imitate")
    # the first right reply of each prompt
    rows = (right.long().argmax(1) + torch.arange(len(prompts)) * samples)[known]
    settings: dict[str, Any] = {"epochs": epochs, "learning_rate": learning_rate}
    _imitate(config, policy, rollout, rows, **settings, progress=progress)
    report = {
        "prompts": len(prompts),
        "imitated": len(rows),
        "left": len(wrong),
        "right_replies": right.float().mean().item(),
        "samples": samples,
        **settings,
        "seed": config.training.seed,
    }
    lines = [json.dumps({"prompt": prompts.texts[i], **prompts.metadata[i]}) + "\n" for i in wrong]
    with new_folder(output, "rejection_sampling.json", report) as folder:
        policy.save(folder / "model")
        (folder / "wrong.jsonl").write_text("".join(lines), encoding="utf-8")
    return report


def _start(config: TextConfig) -> tuple[LanguagePolicy, Prompts]:
    """The configuration's model, and its prompts."""
    torch.manual_seed(config.training.seed)
    policy: LanguagePolicy = build_policy(config, best_device())
    return policy, Prompts.read(config.data.prompts, config.data.where)


def _replies(config: TextConfig, policy: LanguagePolicy, prompts: Prompts, samples: int) -> tuple[TextRollout, Tensor]:
    """The replies to P prompts, side by side, and their rewards [P, samples]."""
    texts = [text for text in prompts.texts for _ in range(samples)]
    metadata = [record for record in prompts.metadata for _ in range(samples)]
    seeds = [derive_seed(config.training.seed, i, 4) for i in range(len(texts))]
    rollout = policy.sample(texts, seeds, metadata=metadata, **config.rollout.arguments())
    value = score(build_reward(config.rewards), policy.decode(rollout), texts, metadata).value
    return rollout, value.view(-1, samples)


def _imitate(
    config: TextConfig, policy: LanguagePolicy, rollout: TextRollout, rows: Tensor, **settings: Any
) -> list[float]:
    """Raise the likelihood of these rows' completions; return each batch's mean loss per token."""
    policy.train_all()

    def losses(batch: Tensor) -> Tensor:
        return -policy.log_probs(rollout, batch)[0]

    def tokens(batch: Tensor) -> Tensor:
        return rollout.mask[batch].sum()

    size = config.training.micro_batch_size
    return fit(policy.trainable(), losses, rows, batch_size=size, size=tokens, **settings)
