"""The configuration of a run that trains a generator of pictures or videos."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from flowalign import registry
from flowalign.config.sections import BaseConfig, Heldout, Named, Network, Section
from flowalign.errors import ConfigError


class Model(Network):
    kind: Literal["pictures"] = "pictures"
    attention: str | None = None
    """diffusers attention backend: native (default), xformers, flash, ..."""
    encode: dict[str, Any] = {}
    """arguments of the pipeline's prompt encoding, e.g. max_sequence_length"""
    base_bits: Literal[4, 8] | None = None
    """of the frozen weights under a LoRA, by bitsandbytes (an extra; GPUs only)"""
    offload_vae: bool = False
    """the VAE stays in the CPU's memory and visits the device to decode, as the text encoders always do to encode"""
    tile_vae: bool = False
    """decode large pictures tile by tile; neighbours blend, which changes pixels a little"""
    slice_vae: bool = False
    """decode one picture at a time"""
    compile: bool = False
    """torch.compile the denoiser's repeated blocks: minutes once, then faster steps"""


class Sampling(Section):
    steps: int = Field(10, ge=1)
    guidance: float = Field(1.0, ge=1)
    """1 samples without classifier-free guidance"""
    sigmas: list[float] | None = None
    """noise levels before the pipeline's own shift; default its scheduler's"""
    height: int | None = Field(None, ge=8)
    width: int | None = Field(None, ge=8)
    num_frames: int | None = Field(None, ge=1)
    """of a video"""
    batch_size: int = Field(16, ge=1)
    """samples a network call, each process"""

    def arguments(self, kept: Sequence[int] | None = None) -> dict[str, Any]:
        """As keyword arguments of `DiffusersPolicy.sample`.

        Args:
            kept: only these steps of the schedule; needs `sigmas`.
        """
        sides = {"height": self.height, "width": self.width, "num_frames": self.num_frames}
        size = {name: side for name, side in sides.items() if side is not None}
        base = {"steps": self.steps, "guidance": self.guidance, "sigmas": self.sigmas}
        if kept is not None:
            assert self.sigmas is not None
            base |= {"steps": len(kept), "sigmas": [self.sigmas[k] for k in kept]}
        return base | {"batch_size": self.batch_size} | size


class RolloutSampling(Sampling):
    kernel: str = "flow_sde"
    eta: float = Field(0.7, ge=0)
    plan: Named = Named(name="all")
    share_start_noise: bool = False
    """the members of a group start from the same noise"""
    overlap: int = Field(1, ge=1)
    """parts an iteration's groups are sampled in: the rewards of one are computed while the next is sampled"""


class Evaluation(Sampling, Heldout):
    pictures_per_prompt: int = Field(1, ge=1)
    save_pictures: int = Field(16, ge=0)

    @property
    def per_prompt(self) -> int:
        return self.pictures_per_prompt

    @property
    def saved(self) -> int:
        return self.save_pictures


class Config(BaseConfig):
    """Of a model that makes pictures."""

    medium = "pictures"
    model: Model
    rollout: RolloutSampling = RolloutSampling()
    evaluation: Evaluation = Evaluation()

    def build_plan(self) -> Any:
        """The plan, checked against the number of steps."""
        plan = registry.build("plans", self.rollout.plan.name, self.rollout.plan.settings, "rollout.plan")
        try:
            etas = plan.etas(self.rollout.steps, self.rollout.eta, 0, 0)
        except ValueError as error:
            raise ConfigError(f"rollout.plan: {error}") from error
        if not (etas > 0).any():
            raise ConfigError(
                f"rollout.plan: '{self.rollout.plan.name}' with {self.rollout.steps} steps and eta "
                f"{self.rollout.eta} has no stochastic step to learn from; raise rollout.steps or rollout.eta"
            )
        return plan

    def check_sampling(self, groups: int) -> None:
        if self.model.base_bits is not None and self.model.lora is None:
            raise ConfigError(
                "model.base_bits: quantised weights cannot be trained themselves; model.lora: {rank: 32} works"
            )
        from samplers import check_eta

        kernel = registry.resolve("kernels", self.rollout.kernel)
        try:
            check_eta(kernel, self.rollout.eta)
        except ValueError as error:
            raise ConfigError(f"rollout.eta: {error}") from error
        self.build_plan()
        for where, sampling in (("rollout", self.rollout), ("evaluation", self.evaluation)):
            if sampling.sigmas is not None and len(sampling.sigmas) != sampling.steps:
                raise ConfigError(
                    f"{where}.sigmas: {len(sampling.sigmas)} noise levels for {where}.steps={sampling.steps}; "
                    "give one a step, without the final 0"
                )
        if self.rollout.overlap > groups:
            raise ConfigError(
                f"rollout.overlap: the {groups} groups of a process cannot be split into {self.rollout.overlap} parts "
                f"(groups stay whole); at most {groups} works"
            )
