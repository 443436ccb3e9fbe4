"""What comes before reinforcement (arXiv 2505.03318): imitation of demonstrations, then of right replies."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from flowalign.config.language import TextConfig
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.policies.language.given import demonstrated
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.runs.files import sync
from flowalign.training.building import build_policy, build_reward
from rewards import score
from samplers import derive_seed

KEY = "demonstration"


def cold_start(
    config: TextConfig, output: Path, epochs: int, learning_rate: float, progress: bool = True
) -> dict[str, Any]:
    """UnifiedReward-Think's first stage, for any prompts with a `demonstration` in their metadata: imitate it.

    Every weight is trained.

    Args:
        config: of the GRPO run that follows: its model, data and seed.
        output: a new folder, which gets `model/` and `cold_start.json`.
        learning_rate: of AdamW, falling linearly to 0.

    Returns:
        what cold_start.json holds.
    """
    torch.manual_seed(config.training.seed)
    policy: LanguagePolicy = build_policy(config, "cuda" if torch.cuda.is_available() else "cpu")
    prompts = Prompts.read(config.data.prompts, config.data.where)
    missing = [text for text, record in zip(prompts.texts, prompts.metadata, strict=True) if KEY not in record]
    if missing:
        raise ConfigError(f"{config.data.prompts}: the prompt {missing[0][:60]!r} has no '{KEY}' to imitate")
    texts = [str(record[KEY]) for record in prompts.metadata]
    rollout = demonstrated(policy, prompts.texts, texts, prompts.metadata)
    rows = torch.arange(len(texts))
    loss = _imitate(policy, rollout, rows, epochs, learning_rate, config.training.micro_batch_size, progress)
    settings = {"epochs": epochs, "learning_rate": learning_rate, "seed": config.training.seed}
    return _write(output, "cold_start", policy, {"demonstrations": len(texts), "loss": loss} | settings)


def sift(
    config: TextConfig, output: Path, samples: int, epochs: int, learning_rate: float, progress: bool = True
) -> dict[str, Any]:
    """UnifiedReward-Think's second stage, for any prompts whose replies are right or wrong.

    The model replies `samples` times to each prompt. It is trained by likelihood on one right reply of every prompt
    that has one; the prompts without are what its third stage, GRPO, learns from. Prompts that share a `pair` in their
    metadata stay together: all of them must have one, so that a judge that always names the first picture is right
    about no pair, and is not taught to. Every weight is trained.

    Args:
        config: of the GRPO run that follows: its model, data, rewards, rollout and seed. A reply is right from a reward
            of 1 on.
        output: a new folder, which gets `model/`, `wrong.jsonl` and `sift.json`.
        learning_rate: of AdamW, falling linearly to 0.

    Returns:
        what sift.json holds.
    """
    seed, size = config.training.seed, config.training.micro_batch_size
    torch.manual_seed(seed)
    policy: LanguagePolicy = build_policy(config, "cuda" if torch.cuda.is_available() else "cpu")
    prompts = Prompts.read(config.data.prompts, config.data.where)
    rollout, value = _replies(config, policy, prompts, samples)
    right = value >= 1 - 1e-6
    pairs = [str(record.get("pair", f"own {i}")) for i, record in enumerate(prompts.metadata)]
    _, pair = np.unique(pairs, return_inverse=True)
    known = _in_all(right.any(1), torch.from_numpy(pair))
    wrong = (~known).nonzero()[:, 0].tolist()
    if not known.any():
        raise ConfigError(f"{config.data.prompts}: the model is right about no prompt, so there is nothing to imitate")
    # the first right reply of each prompt
    rows = (right.long().argmax(1) + torch.arange(len(prompts)) * samples)[known]
    _imitate(policy, rollout, rows, epochs, learning_rate, size, progress)

    report = {
        "prompts": len(prompts),
        "imitated": len(rows),
        "left": len(wrong),
        "right_replies": right.float().mean().item(),
        "samples": samples,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    lines = [json.dumps({"prompt": prompts.texts[i], **prompts.metadata[i]}) + "\n" for i in wrong]
    return _write(output, "sift", policy, report, {"wrong.jsonl": "".join(lines)})


def _write(
    output: Path, stage: str, policy: LanguagePolicy, report: dict[str, Any], files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A folder with the model, the report and further files, which appears when it is whole."""
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    policy.save(partial / "model")
    for name, text in {f"{stage}.json": json.dumps(report, indent=2) + "\n", **(files or {})}.items():
        (partial / name).write_text(text)
    sync(partial)
    os.replace(partial, output)
    return report


def _in_all(right: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[P] bool: whether every member of a prompt's group is right."""
    return torch.ones(int(group.max()) + 1).scatter_reduce(0, group, right.float(), "amin").bool()[group]


def _replies(
    config: TextConfig, policy: LanguagePolicy, prompts: Prompts, samples: int
) -> tuple[TextRollout, torch.Tensor]:
    """The replies to P prompts, side by side, and their rewards [P, samples]."""
    texts = [text for text in prompts.texts for _ in range(samples)]
    metadata = [record for record in prompts.metadata for _ in range(samples)]
    seeds = [derive_seed(config.training.seed, i, 4) for i in range(len(texts))]
    rollout = policy.sample(texts, seeds, metadata=metadata, **config.rollout.arguments())
    value = score(build_reward(config.rewards), policy.decode(rollout), texts, metadata).value
    return rollout, value.view(-1, samples)


def _imitate(
    policy: LanguagePolicy,
    rollout: TextRollout,
    rows: torch.Tensor,
    epochs: int,
    learning_rate: float,
    size: int,
    progress: bool,
) -> float:
    """Raise the likelihood of these rows' completions; returns the last pass's mean loss a token."""
    policy.train_all()
    parameters = list(policy.trainable().values())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    batches: Sequence[torch.Tensor] = [
        batch for _ in range(epochs) for batch in rows[torch.randperm(len(rows))].split(size)
    ]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    losses = []
    for batch in tqdm(batches, desc="imitation", disable=not progress):
        log_prob, _ = policy.log_probs(rollout, batch)
        loss = -log_prob.sum() / rollout.mask[batch].sum()
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return float(np.mean(losses[-len(losses) // epochs :]))
