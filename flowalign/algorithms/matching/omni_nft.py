"""OmniNFT: DiffusionNFT of pictures with sound, with an advantage for each of the two (arXiv 2605.12480).

Samples, both denoised by one network, come from the snapshot `old`. Rewards of the pictures teach the pictures, those
of the sound the sound, all others (that the two fit) both: an advantage of each reward, and their sum by modality.
Loss: the mean of DiffusionNFT's of the pictures and of the sound, at one level with noise of their own. Gradient
surgery: in early blocks the pictures' attention to the sound passes less gradient on, so that they do not spoil it.

Departures from the authors' code: errors are not weighed by where in the picture the sound comes from (their attention
maps); the size that errors are divided by has no gradient, as in DiffusionNFT's code; a modality without a reward is
refused, where theirs takes the mean of all. The last block's layers for the sound alone stay as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from flowalign.algorithms.matching.base import MatchingExperience, Points
from flowalign.algorithms.matching.negative_aware import NegativeAware, NegativeAwareSettings
from flowalign.config import Config, Named
from flowalign.core.record import Record
from flowalign.errors import ConfigError, nearest
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.families import family_of
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class OmniNFTSettings(NegativeAwareSettings):
    advantage: Named = Named(name="per_reward", clip=5.0)
    pictures: list[str] = Field(min_length=1)
    """Rewards that teach the pictures alone; those that neither list names teach both."""
    sound: list[str] = Field(min_length=1)
    """Rewards that teach the sound alone."""
    surgery: dict[int, float] = {1: 0.0, 11: 0.1, 40: 1.0, 48: 0.3}
    """Share of the gradient that reaches the sound through the pictures' attention to it, by block: each share holds
    for the blocks below its number that no smaller number has; published for LTX-2's 48 blocks. {}: all of it."""


@dataclass(kw_only=True)
class OmniExperience(MatchingExperience):
    sound_advantage: Tensor | None = None
    """[B] of the sound; `advantage` is of the pictures."""

    def outcome(self) -> tuple[Tensor, Tensor] | None:
        assert self.sound_advantage is not None
        both = (self.advantage.abs() + self.sound_advantage.abs()) / 2
        return None if self.scores is None else (self.scores.value, both)


class OmniNFT(NegativeAware):
    """OmniNFT: pictures and sound of one network, each by its own advantage (arXiv 2605.12480)."""

    name = "omni_nft"
    Settings = OmniNFTSettings
    settings: OmniNFTSettings
    experience_type = OmniExperience
    # what a search or another process finds comes without its sound
    combines = NegativeAware.combines - {"search", "served", "workers", "replay"}

    def __init__(self, settings: OmniNFTSettings) -> None:
        super().__init__(settings)
        self.operated = False

    def check(self, config: Config) -> None:
        super().check(config)
        settings, names = self.settings, [named.name for named in config.rewards]
        for key, wanted in {"pictures": settings.pictures, "sound": settings.sound}.items():
            for name in wanted:
                if name not in names:
                    raise ConfigError(
                        f"algorithm.{key}: no reward of this run is called '{name}'; {nearest(name, names)}"
                    )
        if settings.own_states:
            raise ConfigError("algorithm.own_states: no states of the sound are kept; false works")
        if settings.guidance not in (None, 1) or settings.reference_guidance is not None:
            raise ConfigError("algorithm.guidance: omni_nft trains velocities without guidance; null works")

    def check_pipeline(self, config: Config, name: str) -> None:
        if not family_of(name).samples_sound:
            raise ConfigError(f"algorithm: omni_nft trains pictures with their sound, and {name} makes none; nft works")

    def beside(self, rollout: Rollout) -> dict[str, Tensor]:
        assert rollout.sound is not None
        return {"sound": rollout.sound}

    def credit(self, record: Record) -> Tensor:
        return super().credit(without(record, self.settings.sound))

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> OmniExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, OmniExperience)
        advantage = super().credit(without(record, self.settings.pictures))
        experience.sound_advantage = processes.own(advantage, len(sampled.batch))
        return experience

    def losses(
        self, policy: DiffusersPolicy, experience: MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = [], dict[str, Tensor]()
        for name, points in self.both(policy, experience, items).items():
            loss, values = self.loss(points)
            loss, more = self.penalized(loss, points)
            losses.append(loss)
            metrics |= {f"{name}/{key}": value for key, value in {**values, **more}.items()}
        counted = experience.counted(items)
        loss = torch.stack(losses).mean(0)
        return loss if counted is None else loss * counted, metrics

    def both(self, policy: DiffusersPolicy, experience: MatchingExperience, items: Tensor) -> Mapping[str, Points]:
        """The pictures and the sounds of these items at their levels, as `points` asks of pictures alone."""
        assert isinstance(experience, OmniExperience) and experience.sound_advantage is not None
        self.operate(policy.network)
        noised = experience.noised(items)
        rows = noised.samples
        places = zip(rows.tolist(), items[:, 1].tolist(), strict=True)
        seeds = [derive_seed(experience.noise_seeds[row], place, 1) for row, place in places]
        sides = noised, experience.clean.noised_sound(noised, seeds)

        def asked() -> tuple[Tensor, Tensor]:
            return policy.velocities_of(experience.clean, *sides)

        reference: tuple[Tensor | None, Tensor | None] = (None, None)
        with torch.no_grad():
            with policy.snapshot("old"):
                old = asked()
            if self.compares_reference:
                named = self.settings.reference
                with policy.reference() if named is None else policy.snapshot(named):
                    reference = asked()
        advantages = experience.advantage[rows], experience.sound_advantage[rows]
        shared: dict[str, Any] = {"reward": experience.reward[rows], "group": experience.group[rows]}
        shared["held"] = 1.0 if experience.held is None else experience.held[rows]
        each = zip(("pictures", "sound"), sides, asked(), advantages, old, reference, strict=True)
        return {
            name: Points(noised=side, velocity=v, advantage=advantage, old=was, reference=start, **shared)
            for name, side, v, advantage, was, start in each
        }

    def divergence(self, points: Points) -> Tensor:
        """[N] mean squared difference from the clean samples that the reference points to."""
        return super().divergence(points) * points.noised.sigma**2

    def operate(self, network: nn.Module) -> None:
        """Let the attention of the blocks pass on its share of the gradient; once, for all passes."""
        if not self.operated:
            for number, block in enumerate(network.get_submodule("transformer_blocks").children()):
                share = next((s for end, s in sorted(self.settings.surgery.items()) if number < end), 1.0)
                block.get_submodule("audio_to_video_attn").register_forward_pre_hook(
                    partial(weakened, share), with_kwargs=True
                )
            self.operated = True


def without(record: Record, names: list[str]) -> Record:
    """The record of the other rewards."""
    left = [row for row, name in enumerate(record.names) if name not in names]
    rewards, weights = record.rewards[left], record.reward_weights[left]
    total = (weights[:, None] * rewards).nansum(0)
    kept = tuple(record.names[row] for row in left)
    return replace(record, reward=total, rewards=rewards, reward_weights=weights, names=kept)


def weakened(
    share: float, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Arguments of attention to the sound, whose gradient is a share of what it would be."""
    sound = kwargs["encoder_hidden_states"]
    return args, kwargs | {"encoder_hidden_states": sound.detach() + share * (sound - sound.detach())}
