"""Learning from texts of the data: a line is a completion of a prompt, or a pair of completions.

Nothing is sampled or scored but the evaluation. Tokens of the prompt, and of pictures in it, are given and teach
nothing.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.algorithms import base
from flowalign.config import Data, TextConfig
from flowalign.core.record import masked_sum
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import demonstrated
from flowalign.rollouts.language import LanguageSampler
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled

SampledLines = Sampled[LanguageSampler, None]


@dataclass(kw_only=True)
class LineExperience(base.Experience):
    """One process's lines of an iteration."""

    rollout: TextRollout
    """Completions of the lines, without log-probabilities."""


class LineLearning(base.Algorithm[TextConfig, LanguageSampler, LanguagePolicy, None, None, LineExperience]):
    """Base: a subclass names the kind of lines, and has their loss."""

    kind = "text"
    combines = frozenset({"shards", "lines", "passes"})
    unit = "lines"
    idle = "the lines' completions are already as likely as they can be, or algorithm.beta is too large"
    lines: ClassVar[type[Prompts]] = Prompts
    """Kind of lines that the data must have."""

    def read(self, data: Data) -> Prompts:
        return self.lines.of(data)

    def check(self, config: TextConfig) -> None:
        name = config.algorithm.name
        if config.training.group_size != 1:
            raise ConfigError(f"training.group_size: '{name}' learns a line of the data once an iteration; 1 works")
        if config.environment is not None:
            raise ConfigError(f"environment: '{name}' learns from texts without turns; with an environment grpo works")

    def items(self, config: TextConfig) -> int:
        return 1

    def rollout(self, sampler: LanguageSampler, batch: Batch) -> tuple[None, Batch]:
        """The lines stand for themselves."""
        return None, batch

    def decode(self, sampler: LanguageSampler, rollout: None) -> None:
        """Nothing is scored."""

    def record(self, sampled: SampledLines, processes: Processes) -> None:
        """There is none."""

    @abstractmethod
    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> LineExperience:
        """The completions of these lines."""

    def verify(self, policy: LanguagePolicy, experience: LineExperience) -> None:
        """Nothing was sampled that a replay could differ from."""


def completions(sampler: LanguageSampler, batch: Batch, keys: Sequence[str]) -> TextRollout:
    """Completions of the batch's prompts under these keys of the metadata: all of the first key, then the second's."""
    texts = [str(line[key]) for key in keys for line in batch.metadata]
    return demonstrated(sampler.policy, batch.prompts * len(keys), texts, batch.metadata * len(keys))


@torch.no_grad()
def text_log_probs(policy: LanguagePolicy, rollout: TextRollout, batch_size: int) -> Tensor:
    """[B] log-probabilities of whole texts, without a gradient."""
    rows = torch.arange(len(rollout), device=policy.device).split(batch_size)
    return torch.cat([masked_sum(policy.log_probs(rollout, chunk)[0], rollout.mask[chunk]) for chunk in rows])


def reference_log_probs(sampler: LanguageSampler, rollout: TextRollout, name: str = "reference") -> Tensor:
    """[B] log-probabilities of whole texts under the start weights, or a named snapshot."""
    with sampler.policy.reference() if name == "reference" else sampler.policy.snapshot(name):
        return text_log_probs(sampler.policy, rollout, sampler.config.rollout.batch_size)


def share_of_tokens(rollout: TextRollout, rows: Tensor, processes: Processes) -> float:
    """Factor of summed token losses of these items whose mean over items is then the mean over all their tokens."""
    tokens = processes.gather(rollout.mask[rows].sum()[None]).sum().item()
    return len(rows) * processes.accelerator.num_processes / tokens


def line_numbers(batch: Batch, device: torch.device) -> Tensor:
    """[B, 1] the lines."""
    return torch.arange(len(batch), device=device)[:, None]
