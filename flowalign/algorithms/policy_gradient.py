"""What policy gradients over denoising steps and over tokens share: an advantage and a loss of the core, by name.

The defaults are a method's published parts. `advantage: {name: ...}` and `loss: {name: ...}` put others in their place,
with the settings given; without a name they change the default's settings: `loss: {clip_range: 1.0e-3}`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from flowalign.algorithms import base
from flowalign.config import Named
from flowalign.core.losses import LOOKS_AT, LooksAt
from flowalign.core.record import Record
from flowalign.errors import ConfigError


class PolicyGradientSettings(base.AlgorithmSettings):
    """Settings that all have; a family and its methods add their own."""

    advantage: Named
    """`flowalign list advantages`, with its settings"""
    loss: Named
    """`flowalign list losses`, with its settings"""
    kl_weight: float = Field(0.0, ge=0)
    """of the divergence from the start weights"""

    moved: ClassVar[dict[str, str]] = {
        "clip_range": "loss: {clip_range: ...}",
        "clip_range_high": "loss: {clip_range_high: ...}",
        "dual_clip": "loss: {dual_clip: ...}",
        "advantage_scale": "advantage: {scale: ...}",
        "advantage_clip": "advantage: {clip: ...}",
        "combine": "advantage: {name: per_reward} or {name: gdpo}",
        "kl_estimator": "kl_estimate",
    }

    @field_validator("advantage", "loss", mode="before")
    @classmethod
    def _with_name(cls, value: Any, field: ValidationInfo) -> Any:
        if isinstance(value, Mapping) and "name" not in value:
            assert field.field_name is not None
            return cls.model_fields[field.field_name].default.model_dump() | dict(value)
        return value


class PolicyGradient(base.Algorithm):
    """Base of the trajectory family and of the language models' algorithms."""

    settings: PolicyGradientSettings
    headline = "reward/mean"
    refills = True
    replays = True
    fields: ClassVar[frozenset[str]] = frozenset({"rewards"})
    """fields of its record that an advantage may need, of those that not every rollout has"""
    dense: ClassVar[bool] = False
    """every action has a reward of its own"""
    piece: ClassVar[LooksAt] = "action"
    """the largest piece that a loss gets at once"""

    def __init__(self, settings: PolicyGradientSettings) -> None:
        super().__init__(settings)
        own = type(self).__name__
        self.advantage_of = settings.advantage.part("advantages", "algorithm.advantage")
        self.loss_of = settings.loss.part("losses", "algorithm.loss")
        self.loss_looks_at: LooksAt = getattr(self.loss_of, "looks_at", "action")
        advantage = f"algorithm.advantage: '{settings.advantage.name}'"
        missing: frozenset[str] = getattr(self.advantage_of, "needs", frozenset()) - self.fields
        if missing:
            raise ConfigError(
                f"{advantage} needs {', '.join(sorted(missing))}, which {own} does not record; grpo works"
            )
        if self.dense and not getattr(self.advantage_of, "dense", False):
            raise ConfigError(f"{advantage} takes one reward a row, and {own} has one for every action; grpo works")
        if LOOKS_AT.index(self.loss_looks_at) > LOOKS_AT.index(self.piece):
            raise ConfigError(
                f"algorithm.loss: '{settings.loss.name}' looks at a whole {self.loss_looks_at} at once, and {own} "
                f"shows it one {self.piece} at a time; ppo works"
            )

    @property
    def uses_reference(self) -> bool:
        return self.settings.kl_weight > 0

    def needs(self, field: str) -> bool:
        """Whether the advantage needs this field of the record."""
        return field in getattr(self.advantage_of, "needs", ())

    def credit(self, record: Record) -> Tensor:
        """[B] or [B, T] advantages from the record of all processes."""
        advantage: Tensor = self.advantage_of(record)
        return advantage

    def advantages(self, record: Record) -> Tensor:
        """[B, T] what each action earned."""
        advantage = self.credit(record)
        return advantage[:, None].expand_as(record.mask) if advantage.dim() == 1 else advantage
