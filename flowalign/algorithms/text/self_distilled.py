"""A model teaches itself: its own weights, shown more than the policy, say how probable each token should be.

Credit: weight * (log p(token | what the teacher is shown) - log pi(token)) of every token under the weights that
sampled
it, beside the rewards' advantage times `reward_weight`. The teacher is the policy's own weights, or a snapshot of them,
under another prompt, which may have: {right}, a right text of the group; {wrong}, its commonest wrong text; {text} and
{reward}, the text that is scored and its reward. Groups whose template names {right} or {wrong} and that have none are
not distilled.

Semantic soft bootstrapping (SSB, arXiv 2512.05105) shows a right and the commonest wrong rollout; SD-Zero shows the own
text with its 0 or 1, and its teacher is synced from time to time (`weights`, a snapshot of `training.snapshots`). After
the abstracts. Departure: these match whole distributions; here only the sampled tokens', as on-policy distillation
does.
"""

from collections import Counter
from contextlib import nullcontext

import torch
from pydantic import Field

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.prompted import check_fields, fields_of, filled, under
from flowalign.config import Data, TextConfig
from flowalign.core.imitation import distillation_advantage
from flowalign.core.record import Record, masked_mean
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes

GIVEN = ("right", "wrong", "text", "reward")
"""Names that a template may have besides the prompt and keys of its metadata."""


class SelfDistilledSettings(language.LanguageSettings):
    template: str = "A right answer: {right}\nA wrong answer: {wrong}\n\n{prompt}"
    """Prompt of the teacher."""
    weights: str | None = None
    """Snapshot that teaches, of `training.snapshots`; null: the weights that sampled."""
    weight: float = Field(1.0, ge=0)
    """Weight of the teacher's log-ratios."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the rewards' advantage."""
    right: float = 0.5
    """Reward from which on a text is right."""


class SelfDistilled(language.LanguageAlgorithm):
    """The model's own weights under a richer prompt teach it without that prompt (after SSB, arXiv 2512.05105)."""

    name = "self_distilled"
    Settings = SelfDistilledSettings
    settings: SelfDistilledSettings
    takes_turns = False

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        check_fields(self.settings.template, prompts, GIVEN)
        return prompts

    def check(self, config: TextConfig) -> None:
        super().check(config)
        name = self.settings.weights
        if name is not None and name not in config.training.snapshots:
            raise ConfigError(f"algorithm.weights: no snapshot is called '{name}'; training.snapshots makes some")

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        rollout, policy, s = sampled.rollout, sampled.sampler.policy, self.settings
        prompts, taught = self.shown(sampled)
        swapped = nullcontext() if s.weights is None else policy.snapshot(s.weights)
        with swapped:
            size = sampled.sampler.config.rollout.batch_size
            teacher = under(policy, rollout, prompts, sampled.batch.metadata, size).log_prob
        distilled = s.weight * distillation_advantage(rollout.log_prob, teacher)
        rows = torch.tensor(taught, device=processes.device)
        distilled = distilled.where(rollout.mask & rows[:, None], 0)
        experience.advantage = s.reward_weight * experience.advantage + distilled
        gap = masked_mean((rollout.log_prob - teacher).where(rows[:, None], 0), rollout.mask)
        experience.metrics["policy/teacher_kl"] = processes.gather(gap).mean().item()
        experience.metrics["policy/taught"] = processes.gather(rows.float()).mean().item()
        return experience

    def shown(self, sampled: SampledTexts) -> tuple[list[str], list[bool]]:
        """The teacher's prompt of each text, and whether it has all that the template names."""
        batch, texts = sampled.batch, sampled.sampler.decode(sampled.rollout)
        assert sampled.scores is not None
        reward = sampled.scores.value.tolist()
        of_group: dict[int, list[int]] = {}
        for row, number in enumerate(batch.group):
            of_group.setdefault(number, []).append(row)
        prompts, taught, wanted = list(batch.prompts), [False] * len(batch), fields_of(self.settings.template)
        for members in of_group.values():
            found: dict[str, str] = {}
            right = [texts[i] for i in members if reward[i] >= self.settings.right]
            wrong = Counter(texts[i] for i in members if reward[i] < self.settings.right)
            if right:
                found["right"] = right[0]
            if wrong:
                found["wrong"] = wrong.most_common(1)[0][0]
            for i in members:
                known = dict(batch.metadata[i]) | found | {"text": texts[i], "reward": f"{reward[i]:g}"}
                taught[i] = not {
                    name for name in wanted & set(GIVEN) if name not in found and name in ("right", "wrong")
                }
                if taught[i]:
                    prompts[i] = filled(self.settings.template, batch.prompts[i], known)
        return prompts, taught
