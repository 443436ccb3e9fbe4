"""Previews for people: how samples of a few prompts came to be, and how groups were judged."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.algorithms.base import Algorithm, Preview
from flowalign.core.credit import dense_rewards, turning_points
from flowalign.core.record import masked_mean
from flowalign.data import Prompts
from flowalign.data.batches import Batch, draw_batch
from flowalign.data.sizes import rows_by_size
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import characters
from flowalign.policies.language.unified import UnifiedPolicy
from flowalign.policies.rendering import renderer
from flowalign.rollouts.language import LanguageSampler
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.sampler import Sampler
from flowalign.rollouts.scoring import Scorer
from flowalign.runs.previews import Film, Group, save_previews
from rewards import Reward
from rewards import seen as look
from samplers.completion import completions
from samplers.kernels import step_std
from samplers.plans import Tree

MEMBERS = 8
"""Samples of a prompt, at most."""


@torch.no_grad()
def preview(
    sampler: Sampler, scorer: Scorer, algorithm: Algorithm, prompts: Prompts, folder: Path, iteration: int
) -> None:
    """Sample groups of a few prompts as the algorithm does, and save how their members came to be.

    Prompts, seeds and noises are the same each time. Forwards and reward calls are not counted.
    """
    training = sampler.config.training
    # previews are made together
    prompts = prompts.take(next(iter(rows_by_size(prompts.metadata).values())))
    shown = prompts.spread(min(training.previews, len(prompts)))
    save_previews(folder, iteration, *seen_groups(sampler, scorer, algorithm, shown, iteration, training.seed))


@torch.no_grad()
def seen_groups(
    sampler: Sampler, scorer: Scorer, algorithm: Algorithm, prompts: Prompts, iteration: int, seed: int
) -> tuple[list[Film], list[Group]]:
    """A group of each prompt, sampled as the algorithm does, and the film of its first member.

    Args:
        iteration: iteration whose plan says which steps are stochastic.
        seed: seed of the noises.
    """
    count, members = len(prompts), min(sampler.config.training.group_size, MEMBERS)
    if "lines" in algorithm.combines:
        members = MEMBERS
    share_start_noise = True
    if isinstance(sampler, DiffusionSampler):
        share_start_noise = sampler.config.rollout.share_start_noise
        # a tree's members are its leaves, whose number is fixed
        members = sampler.plan.leaves if isinstance(sampler.plan, Tree) else members
    batch = draw_batch(prompts, 0, count, members, seed, share_start_noise)
    batch = dataclasses.replace(batch, iteration=iteration)
    with scorer.alone(), sampler.policy.uncounted():
        if isinstance(sampler, LanguageSampler) and "advantages" in algorithm.combines:
            return [], _judged_groups_of_texts(sampler, scorer, algorithm, batch)
        if isinstance(sampler, LanguageSampler):
            return [], _plain_groups_of_texts(sampler, scorer, batch)
        assert isinstance(sampler, DiffusionSampler)
        seen = algorithm.show(sampler, scorer, batch)
        # an algorithm that branches makes several groups of a prompt: the first one is shown
        firsts = [seen.batch.prompts.index(prompt) for prompt in dict.fromkeys(seen.batch.prompts)]
        # states of a sample that is made in chunks have no completion by the schedule
        filmed = firsts if sampler.config.rollout.chunks == 1 else []
        films = [_film(sampler, scorer, algorithm, seen, row) for row in filmed]
        return films, [_group(seen, seen.batch.group[row]) for row in firsts]


def _film(sampler: DiffusionSampler, scorer: Scorer, algorithm: Algorithm, seen: Preview, row: int) -> Film:
    """A sample's film: the completion of each of its states, and what each of its steps earned."""
    sample = seen.rollout[torch.tensor([row], device=sampler.device)]
    trajectory = sample.trajectory
    finished = completions(sampler.policy.at(sample), trajectory)
    ends = sampler.ends(sample, finished, shown=True)
    values = scorer.score(ends, seen.batch, [row] * len(ends), finished.steps.tolist()).value[finished.index.cpu()]
    # the density of an algorithm's own noise changes with the weights too
    noise, ratios = (None, None) if algorithm.noise == "own" else (_noise(sample), _ratios(sampler.policy, sample))
    return Film(
        prompt=seen.batch.prompts[row],
        seed=seen.batch.seeds[row],
        pictures=[look(ends[state]) for state in finished.index[0].tolist()],
        rewards=values[0].tolist(),
        dense=dense_rewards(values)[0].tolist(),
        advantages=None if seen.advantage is None else seen.advantage[row].tolist(),
        sparse=None if seen.sparse is None else seen.sparse[row].item(),
        ratios=ratios,
        noise=noise,
        stochastic=trajectory.mask[0].tolist(),
        turning=turning_points(values, trajectory.mask.cpu())[0].tolist(),
        sigmas=trajectory.sigmas.tolist(),
        metadata=seen.batch.metadata[row],
    )


def _noise(sample: Rollout) -> list[float]:
    """[T] standard deviations of a sample's steps."""
    trajectory = sample.trajectory
    values: list[float] = step_std(sample.kernel, trajectory.sigmas, trajectory.eta[0]).tolist()
    return values


def _ratios(policy: DiffusersPolicy, sample: Rollout) -> list[float] | None:
    """[T] probability of a sample's steps under the weights over that under the start weights; None without a LoRA.

    Of log-probabilities that are means over a sample's elements, as the losses have them; NaN at deterministic steps.
    """
    samples, steps = sample.trajectory.mask.nonzero().unbind(1)
    if not policy.lora:
        return None
    ratios = torch.full(sample.trajectory.mask.shape[1:], torch.nan)
    if len(steps):
        log_prob = policy.score(sample, samples, steps).log_prob
        with policy.reference():
            start = policy.score(sample, samples, steps).log_prob
        ratios[steps.cpu()] = (log_prob - start).exp().cpu()
    values: list[float] = ratios.tolist()
    return values


def _group(seen: Preview, number: int) -> Group:
    """A group with its members; a member's advantage is the mean over the steps that have one."""
    rows = [row for row, group in enumerate(seen.batch.group) if group == number]

    def of(values: Tensor) -> list[float]:
        return values[rows].tolist()

    scores = dict(seen.scores.parts)
    if not torch.equal(seen.reward.cpu(), seen.scores.value):
        scores["score"] = seen.scores.value
    return Group(
        prompt=seen.batch.prompts[rows[0]],
        seeds=[seen.batch.noise_seeds[row] for row in rows],
        samples=[look(seen.images[row]) for row in rows],
        rewards=of(seen.reward),
        advantages=None if seen.advantage is None else of(seen.advantage.nanmean(1)),
        parts={name: of(values) for name, values in scores.items()},
        wins=None if seen.wins is None else seen.wins[rows][:, rows].tolist(),
        metadata=seen.batch.metadata[rows[0]],
    )


def _rows_of_groups(batch: Batch) -> list[list[int]]:
    """The rows of each group."""
    return [[row for row, group in enumerate(batch.group) if group == number] for number in dict.fromkeys(batch.group)]


def _groups_of_texts(batch: Batch, samples: Sequence[Any], reward: Tensor, parts: Mapping[str, Tensor]) -> list[Group]:
    """The groups of a batch of texts, or of the pictures that rewritten prompts gave, with their rewards."""
    return [
        Group(
            prompt=batch.prompts[rows[0]],
            seeds=[batch.noise_seeds[row] for row in rows],
            samples=[samples[row] for row in rows],
            rewards=reward[rows].tolist(),
            parts={name: values[rows].tolist() for name, values in parts.items()},
            metadata=batch.metadata[rows[0]],
        )
        for rows in _rows_of_groups(batch)
    ]


def _plain_groups_of_texts(sampler: LanguageSampler, scorer: Scorer, batch: Batch) -> list[Group]:
    """The groups of a batch that a method without advantages samples for people to look at."""
    texts = sampler.decode(sampler.rollout(batch))
    scores = scorer.score(texts, batch)
    return _groups_of_texts(batch, texts, scores.value, scores.parts)


def _judged_groups_of_texts(
    sampler: LanguageSampler, scorer: Scorer, algorithm: Algorithm, batch: Batch
) -> list[Group]:
    """The groups of a batch with the advantages of tokens, or pictures: of rewritten prompts, or drawn after a plan."""
    experience = algorithm.at_once(sampler, scorer, batch)
    rollout, advantage = experience.rollout, experience.advantage
    texts, rewriting = sampler.policy.decode(rollout), renderer(scorer.reward)
    samples: Sequence[Any] = texts
    words: list[str] | None = None
    if rewriting is not None:
        samples = rewriting.render(texts, scorer.metadata(batch, range(len(batch))))
        words = [rewriting.prompt(text) for text in texts]
    elif isinstance(sampler.policy, UnifiedPolicy):
        words = sampler.policy.plans(rollout)
    earned = masked_mean(advantage, rollout.mask)

    def tokens(row: int) -> list[tuple[str, float, float, float]]:
        return _tokens(sampler.policy, rollout, advantage, row, texts[row])

    groups = _groups_of_texts(batch, samples, experience.reward, experience.scores.parts)
    return [
        dataclasses.replace(
            group,
            advantages=earned[rows].tolist(),
            rewritten=None if words is None else [words[row] for row in rows],
            tokens=[tokens(row) for row in rows] if words is None else None,
        )
        for group, rows in zip(groups, _rows_of_groups(batch), strict=True)
    ]


def _tokens(
    policy: LanguagePolicy, rollout: TextRollout, advantage: Tensor, row: int, text: str
) -> list[tuple[str, float, float, float]]:
    """Each token's piece of the text, log-probability, entropy and advantage."""
    present = rollout.present[row]
    ends = characters(policy, rollout.completion_ids[row][present].tolist())
    pieces = [text[start:end] for start, end in zip([0, *ends], ends)]
    # tokens of an environment's answers have no numbers
    columns = (rollout.log_prob[row], rollout.entropy[row], advantage[row])
    values = zip(*(column.where(rollout.mask[row], torch.nan)[present].tolist() for column in columns), strict=True)
    return [(piece, *numbers) for piece, numbers in zip(pieces, values, strict=True)]


def shown(reward: Reward, samples: Sequence[tuple[Any, dict[str, Any]]]) -> Sequence[tuple[Any, dict[str, Any]]]:
    """An evaluation's samples as they are saved; rewritten prompts are replaced by the pictures made from them."""
    rewriting = renderer(reward)
    if rewriting is None:
        return samples
    texts, records = zip(*samples, strict=True)
    lines = [record | {"rewritten": rewriting.prompt(text)} for text, record in samples]
    return list(zip(rewriting.render(texts, records), lines, strict=True))
