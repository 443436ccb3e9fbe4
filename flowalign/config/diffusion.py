"""The configuration of a run that trains a generator of pictures or videos."""

from typing import Any

from pydantic import Field

from flowalign import registry
from flowalign.config.sections import BaseConfig, Heldout, Named
from flowalign.errors import ConfigError
from flowalign.policies.settings import Model, Sampling


class RolloutSampling(Sampling):
    kernel: str = "flow_sde"
    eta: float = Field(0.7, ge=0)
    plan: Named = Named(name="all")
    share_start_noise: bool = False
    """the members of a group start from the same noise"""
    overlap: int = Field(1, ge=1)
    """parts an iteration's groups are sampled in: the rewards of one are computed while the next is sampled"""


class Evaluation(Sampling, Heldout):
    """How held-out prompts are sampled, and scored."""


class Config(BaseConfig):
    """Of a model that makes pictures."""

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
