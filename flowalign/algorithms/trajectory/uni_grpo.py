"""UniGRPO: a text and the picture drawn after it are one policy's actions, with one advantage (arXiv 2603.23500).

Rollout: a language model writes a text for every member of a group, reasoning or a better prompt, and the generator
draws a picture from it by the SDE. With `writer: {path: own}` the text is the picture's tokens, which the pipeline's
own language model draws before the first step, as GLM-Image's does. Credit is Flow-GRPO's: one reward a finished
picture, normalised within the group of the prompt. Loss: Flow-GRPO's of every denoising step, plus `text_weight` times
GRPO's of the text, the mean over its tokens, with the same advantage. Both networks move in every update.

The paper's own settings: no guidance in rollouts, and in the place of the KL the mean squared difference of the
velocity from the start weights' (`divergence: velocity_mse`). Both are defaults of the recipe, not forced.

The writer's forwards are not in the count of forwards, which is the generator's.

Departures: the paper's two experts share one network's attention (BAGEL), here the writer is any causal language
model and the generator any pipeline, joined by the text, or both are networks of one pipeline; the paper's text was
read from its abstract and accounts of it, and no code was published.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.algorithms.trajectory.writers import WRITER, WordWriter, WriterSettings, build_writer, check_own
from flowalign.config import Config, Named
from flowalign.core.record import Actions, Record, masked_mean
from flowalign.core.seams import checked_loss
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.families import family_of
from flowalign.policies.diffusion.picture_tokens import PictureWriter
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


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
    writer: WordWriter | PictureWriter

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

    def check_pipeline(self, config: Config, name: str) -> None:
        super().check_pipeline(config, name)
        check_own(self.settings.writer, name, family_of(name).language_model)

    def modules(self, policy: DiffusersPolicy) -> Mapping[str, nn.Module]:
        self.writer = policy.writer = build_writer(self.settings.writer, policy)
        if getattr(policy.denoiser, "is_gradient_checkpointing", False):
            self.writer.checkpoint_gradients()
        return {WRITER: self.writer.network}

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
