"""Sampling texts, and gathering their record."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowalign.config.language import TextConfig
from flowalign.core.record import Record
from flowalign.core.sharpened import influence_of
from flowalign.data import shipped
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language.chat import asked
from flowalign.policies.language.decoding import collision_of
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import at_tokens
from flowalign.policies.language.turns import AgentPolicy
from flowalign.policies.language.vllm import VLLMEngine
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled, Sampler


class LanguageSampler(Sampler):
    """Samples texts with a policy, by transformers or by vLLM, with the settings of the rollout section."""

    config: TextConfig
    policy: LanguagePolicy

    def __init__(self, config: TextConfig, policy: LanguagePolicy) -> None:
        super().__init__(config, policy)
        if config.environment is not None and not isinstance(policy, AgentPolicy):
            raise ConfigError("environment: the policy that was handed in takes no turns; an AgentPolicy does")
        self._engine: VLLMEngine | None = None

    def rollout(self, batch: Batch) -> TextRollout:
        """Sample a completion for every sample of the batch."""
        arguments = self.config.rollout.arguments()
        if not self.config.rollout.engine.inside:
            return self.policy.sample(batch.prompts, batch.noise_seeds, metadata=batch.metadata, **arguments)
        if self._engine is None:
            path = str(shipped(self.config.model.path))
            self._engine = VLLMEngine(self.policy, path, self.config.rollout.engine_memory)
        return self._engine.sample(asked(batch.prompts, batch.metadata), batch.noise_seeds, **arguments)

    def cuts(self, batch: Batch) -> list[int]:
        # turns are put together by who still plays, and vLLM puts its batches together itself
        alone = self.config.environment is None and not self.config.rollout.engine.inside
        return batch.starts(self.config.rollout.batch_size) if alone else [0]

    def decode(self, rollout: TextRollout, shown: bool = False) -> list[str]:
        """The completions as texts."""
        return self.policy.decode(rollout)

    def cat(self, rollouts: Sequence[TextRollout]) -> TextRollout:
        return TextRollout.cat(rollouts)

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any], batch: Batch) -> TextRollout:
        return TextRollout.unpacked(tensors, rest, batch.prompts).to(self.device)


SampledTexts = Sampled[LanguageSampler, TextRollout]


def baseline(sampled: SampledTexts) -> Tensor:
    """Rewards [B] of the greedy completion of each sample's prompt, which is made once per group."""
    batch, sampler = sampled.batch, sampled.sampler
    numbers = list(dict.fromkeys(batch.group))
    rows = [batch.group.index(number) for number in numbers]
    arguments = sampler.config.rollout.arguments() | {"temperature": 0.0}
    first_rows = batch[rows]
    greedy = sampler.policy.sample(first_rows.prompts, [0] * len(rows), metadata=first_rows.metadata, **arguments)
    value = sampled.scorer.score(sampler.policy.decode(greedy), batch, rows).value
    return value[[numbers.index(group) for group in batch.group]]


def record_of_texts(sampled: SampledTexts, reward: Tensor, processes: Processes) -> Record:
    """The record of all processes, where a token is an action.

    Args:
        reward: [B] rewards of this process's samples.
    """
    rollout, scores = sampled.rollout, sampled.scores
    gathered = partial(gather_padded, processes, length=processes.maximum(rollout.mask.shape[1]))
    return Record(
        reward=processes.gather(reward.to(processes.device)),
        mask=gathered(rollout.mask),
        log_prob=gathered(rollout.log_prob),
        entropy=gathered(rollout.entropy),
        steps=None if scores.steps is None else gathered(at_tokens(sampled.sampler.policy, rollout, scores.steps)),
        turn=gathered(rollout.turn) if rollout.episodes else None,
        ended=processes.gather(rollout.ended),
        **sampled.gathered(processes),
    )


def gathered_states(sampled: SampledTexts, processes: Processes) -> Tensor:
    """`states` or `states_of_turns` of all processes; a group is on one process, so that its numbers are consistent."""
    rollout = sampled.rollout
    numbers = (states_of_turns if rollout.episodes else states)(rollout, sampled.batch.group)
    return gather_padded(processes, numbers, processes.maximum(numbers.shape[1]))


def gathered_collision(sampled: SampledTexts, processes: Processes) -> Tensor:
    """[B, T] sums of squared probabilities where tokens were drawn, of all processes; costs a forward pass."""
    policy, rollout = sampled.sampler.policy, sampled.rollout
    rows = torch.arange(len(rollout), device=policy.device).split(sampled.sampler.config.rollout.batch_size)
    with torch.no_grad():
        collision = torch.cat([policy.log_probs(rollout, chunk, collision_of)[1] for chunk in rows])
    return gather_padded(processes, collision, processes.maximum(collision.shape[1]))


def gathered_reference(sampled: SampledTexts, processes: Processes) -> Tensor:
    """[B, T] log-probabilities under the start weights, of all processes; costs a forward pass."""
    policy, rollout = sampled.sampler.policy, sampled.rollout
    rows = torch.arange(len(rollout), device=policy.device).split(sampled.sampler.config.rollout.batch_size)
    with torch.no_grad(), policy.reference():
        reference = torch.cat([policy.log_probs(rollout, chunk)[0] for chunk in rows])
    return gather_padded(processes, reference, processes.maximum(reference.shape[1]))


def gathered_influence(sampled: SampledTexts, processes: Processes) -> Tensor:
    """[B, T] `influence_of` each token on its group's right texts, of all processes; costs a forward pass.

    A text is right from a reward of 1/2 on. Of the vocabulary only tokens that the group drew count, as published.
    """
    policy, rollout = sampled.sampler.policy, sampled.rollout
    right = (sampled.scores.value > 0.5).to(policy.device)
    influence = torch.zeros_like(rollout.log_prob)
    for number in dict.fromkeys(sampled.batch.group):
        rows = torch.tensor([row for row, group in enumerate(sampled.batch.group) if group == number])
        rows = rows.to(policy.device)
        mask = rollout.mask[rows]
        drawn, column = rollout.completion_ids[rows][mask].unique(return_inverse=True)
        with torch.no_grad():
            error, hidden = policy.errors(rollout, rows, drawn, column)
        of_right = right[rows][:, None].expand_as(mask)[mask]
        influence[rows] = torch.zeros_like(mask, dtype=influence.dtype).masked_scatter(
            mask, influence_of(error, hidden, of_right)
        )
    return gather_padded(processes, influence, processes.maximum(influence.shape[1]))


def gather_padded(processes: Processes, values: Tensor, length: int) -> Tensor:
    """Rows [B, T] of all processes, padded to `length`."""
    return processes.gather(torch.nn.functional.pad(values, (0, length - values.shape[1])))


def states(rollout: TextRollout, group: Sequence[int]) -> Tensor:
    """Numbers [B, T] of each token's context: members of a group with the same tokens so far have the same number."""
    numbers: dict[tuple[int, int], int] = {}
    context = torch.zeros(rollout.mask.shape, dtype=torch.long)
    lengths = rollout.mask.sum(1).tolist()
    for row, (tokens, length, number) in enumerate(zip(rollout.completion_ids.tolist(), lengths, group, strict=True)):
        # key of a context: the number of the context before, and the token after that; each group has its own first key
        before = (-1, number)
        for t in range(length):
            state = numbers.setdefault(before, len(numbers))
            context[row, t] = state
            before = (state, tokens[t])
    return context.to(rollout.mask.device)


def states_of_turns(rollout: TextRollout, group: Sequence[int]) -> Tensor:
    """Numbers [B, T] of the environment's state before each turn, at all tokens of it: one number for each state."""
    numbers: dict[tuple[int, str], int] = {}
    numbered = torch.zeros(rollout.mask.shape, dtype=torch.long)
    for row, (turns, number) in enumerate(zip(rollout.episodes, group, strict=True)):
        for turn, taken in enumerate(turns):
            numbered[row, (rollout.turn[row] == turn).cpu()] = numbers.setdefault((number, taken.state), len(numbers))
    return numbered.to(rollout.mask.device)
