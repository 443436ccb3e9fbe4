"""UniGRPO: a text and the picture drawn after it are one policy's actions, with one advantage (arXiv 2603.23500).

Rollout: a language model writes a text for every member of a group, reasoning or a better prompt, and the generator
draws a picture from it by the SDE. Credit is Flow-GRPO's: one reward a finished picture, normalised within the group
of the prompt. Loss: Flow-GRPO's of every denoising step, plus `text_weight` times GRPO's of the text, the mean over its
tokens, with the same advantage. Both networks move in every update.

The paper's own settings: no guidance in rollouts, and in the place of the KL the mean squared difference of the
velocity from the start weights' (`divergence: velocity_mse`). Both are defaults of the recipe, not forced.

The writer's forwards are not in the count of forwards, which is the generator's.

Departures: the paper's two experts share one network's attention (BAGEL), here the writer is any causal language
model and the generator any pipeline, joined by the text; the paper's text was read from its abstract and
accounts of it, and no code was published.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from flowalign.algorithms import base
from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config, Named
from flowalign.core.record import Actions, Record, masked_mean
from flowalign.core.seams import checked_loss
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class WriterSettings(base.AlgorithmSettings):
    path: str
    """Folder or hub name of a causal language model, or a shipped one."""
    shown: str = "{prompt} {text}"
    """Text for the generator's text encoders, with the prompt and the written text in their places."""
    max_new_tokens: int = Field(64, gt=0)
    temperature: float = Field(1.0, gt=0)
    chat: bool = False
    """Put the prompt into the model's chat template."""
    system: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the frozen weights below a LoRA; without one all weights are trained, in float32."""
    lora: int | None = Field(None, gt=0)
    """Rank of a LoRA; null trains all weights."""

    @field_validator("shown")
    @classmethod
    def _with_text(cls, shown: str) -> str:
        if "{text}" not in shown:
            raise ValueError("has no {text}, so that nothing of what was written would be drawn")
        return shown


class UniGRPOSettings(trajectory.PolicySettings):
    writer: WriterSettings
    text_loss: Named = Named(name="ppo", clip_range=0.2)
    """Loss of a token by name, with its settings."""
    text_weight: float = Field(1.0, ge=0)
    """Weight of the text's loss beside the picture's."""


class UniGRPO(TrajectoryAlgorithm):
    """UniGRPO: a language model writes, the generator draws, and one reward teaches both (arXiv 2603.23500)."""

    name = "uni_grpo"
    Settings = UniGRPOSettings
    settings: UniGRPOSettings
    # a group's members are drawn from texts of their own, which other processes and files do not have
    combines = TrajectoryAlgorithm.combines - {"workers", "served", "replay", "search", "overlap", "whole"}
    samples_otherwise = True
    writer: LanguagePolicy

    def __init__(self, settings: UniGRPOSettings) -> None:
        super().__init__(settings)
        self.text_loss_of = settings.text_loss.part("losses", "algorithm.text_loss")
        if getattr(self.text_loss_of, "looks_at", "action") == "group":
            raise ConfigError(
                f"algorithm.text_loss: '{settings.text_loss.name}' looks at a whole group at once, and texts are shown "
                "with single steps; ppo works"
            )

    def check(self, config: Config) -> None:
        super().check(config)
        if config.rollout.share_start_noise:
            raise ConfigError(
                "rollout.share_start_noise: members of a group are drawn from different texts, so that their first "
                "steps are not alike; false works"
            )
        if self.settings.step_fraction < 1:
            raise ConfigError("algorithm.step_fraction: a text is learned from with its picture's first step; 1 works")

    def modules(self, policy: DiffusersPolicy) -> Mapping[str, nn.Module]:
        s = self.settings.writer
        self.writer = LanguagePolicy.from_pretrained(
            Path(shipped(s.path)), s.dtype, policy.device, chat=s.chat, system=s.system
        )
        if s.lora is None:
            self.writer.train_all()
        else:
            self.writer.add_lora(s.lora, s.lora, "all-linear")
        policy.writer = self.write
        return {"writer": self.writer.network}

    def write(self, prompts: Sequence[str], seeds: Sequence[int]) -> tuple[list[str], TextRollout]:
        """What is drawn for each prompt, and the texts in it as they were sampled."""
        s, seeds = self.settings.writer, [derive_seed(seed, 9) for seed in seeds]
        rollout = self.writer.sample(prompts, seeds, max_new_tokens=s.max_new_tokens, temperature=s.temperature)
        texts = self.writer.decode(rollout)
        shown = [s.shown.replace("{prompt}", p).replace("{text}", t) for p, t in zip(prompts, texts, strict=True)]
        return [text.strip() for text in shown], rollout

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        written = experience.rollout.written
        of_texts = {
            "text/tokens": written.mask.sum(1).float(),
            "text/entropy": masked_mean(written.entropy, written.mask),
        }
        experience.metrics |= {name: processes.gather(each).mean().item() for name, each in of_texts.items()}
        return experience

    def losses(
        self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses; that of a text is added to its picture's first step, as often as the picture has steps, so that
        the mean over all items is the mean over pictures plus that over texts."""
        loss, values = super().losses(policy, experience, items)
        samples, steps = items.unbind(1)
        mask = experience.rollout.mask[samples]
        first = (steps == mask.int().argmax(1)).nonzero()[:, 0]
        if not len(first):
            # every process has a gradient of the writer, so that collective operations match
            none = sum(parameter.sum() for parameter in self.writer.trainable().values())
            return loss + 0 * none, values | {"text/ratio": torch.zeros_like(loss)}
        count = mask[first].sum(1)
        text, ratio = self.text_losses(experience, samples[first], steps[first])
        values["text/ratio"] = torch.zeros_like(loss).index_put((first,), count * ratio.detach())
        return loss + torch.zeros_like(loss).index_put((first,), self.settings.text_weight * count * text), values

    def text_losses(self, experience: ActionExperience, samples: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """[R] mean loss and mean ratio of the tokens of these samples' texts, with the advantage of these steps."""
        written: TextRollout = experience.rollout.written
        log_prob, _ = self.writer.log_probs(written, samples)
        mask = written.mask[samples]
        advantage = (experience.advantage * experience.loss_weight)[samples, steps]
        tokens = Actions(
            log_prob=log_prob,
            old_log_prob=written.log_prob[samples],
            advantage=advantage[:, None].expand_as(log_prob),
            mask=mask,
            group=experience.group[samples],
            reward=experience.reward[samples],
        )
        source = f"algorithm.text_loss: '{self.settings.text_loss.name}'"
        loss, _ = checked_loss(source, self.text_loss_of(tokens), mask.shape)
        return masked_mean(loss, mask), masked_mean(tokens.ratio, mask)
