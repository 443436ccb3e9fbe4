"""The configuration of a run that trains a generator of pictures or videos."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from flowalign import registry
from flowalign.config.method import Method
from flowalign.config.sections import BaseConfig, Heldout, Named, Rollouts, RolloutSearch
from flowalign.errors import ConfigError
from flowalign.policies.settings import Model, Sampling
from flowalign.runs.files import check_output

if TYPE_CHECKING:
    from torch import Tensor

    from samplers.kernels import Kernel


def check_levels(sigmas: Sequence[float], where: str) -> None:
    """Refuse noise levels that do not fall, from at most 1 to above 0."""
    falling = all(first > second for first, second in itertools.pairwise(sigmas))
    if not sigmas or not falling or sigmas[0] > 1 or sigmas[-1] <= 0:
        raise ConfigError(
            f"{where}: noise levels fall from at most 1 to above 0, each below the one before (got {list(sigmas)}); "
            "e.g. [1.0, 0.75, 0.5, 0.25]"
        )


class RolloutSampling(Sampling, Rollouts):
    kernel: str = "flow_sde"
    eta: float = Field(0.7, ge=0)
    plan: Named = Named(name="all")
    share_start_noise: bool = False
    """Whether the samples of a group start from the same noise."""
    guidance_gradient: Literal["both", "conditional"] = "both"
    """Branches of guidance that updates have a gradient through; with one, an update costs about a quarter less."""
    merge_lora: bool = False
    """Whether trajectories are sampled with the LoRA added to copies of the weights, which saves its own products; the
    updates replay without, so that ratios start at 1 but for rounding."""
    cache: Named | None = None
    """Cache of features, which rollouts keep from step to step (`flowalign list caches`); replay, completions and
    evaluation go without it."""
    store: Literal["device", "host", "disk"] = "device"
    """Where trajectories wait for the updates: on the device, in the host's memory, or in files of the run's folder,
    which vanish with the iteration; updates have the same numbers, and copy what they read (docs/scale.md)."""
    save_every: int = Field(0, ge=0)
    """Iterations from one whose trajectories are written to the run's folder, in rollouts/, to the next, for `flowalign
    verify-rollout`; the newest 8 files of each process stay; 0: none are written."""


class Evaluation(Sampling, Heldout):
    """How held-out prompts are sampled, and scored."""


class Config(BaseConfig):
    """Configuration of a run that trains a model of pictures or videos."""

    model: Model
    rollout: RolloutSampling = RolloutSampling()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _evaluate_as_sampled(self) -> Self:
        """Fill settings that evaluation leaves out from the rollout; noise levels only if the steps are as many."""
        self.evaluation = self.evaluation.following(self.rollout)
        return self

    def build_kernel(self) -> "Kernel":
        """The kernel, checked on a small step."""
        from flowalign.core.seams import check_kernel  # loads torch

        kernel = registry.resolve("kernels", self.rollout.kernel)
        check_kernel(f"rollout.kernel: '{self.rollout.kernel}'", kernel)
        return kernel

    def build_plan(self, silent: bool = False) -> Any:
        """The plan, checked against the number of steps.

        Args:
            silent: allow a plan without a stochastic step.
        """
        plan = registry.build("plans", self.rollout.plan.name, self.rollout.plan.settings, "rollout.plan")
        if not hasattr(plan, "etas"):
            raise ConfigError(f"rollout.plan: '{self.rollout.plan.name}' has no 'etas' (docs/extending.md#a-plan)")
        try:
            etas = plan.etas(self.rollout.steps, self.rollout.eta, 0, 0)
        except ValueError as error:
            raise ConfigError(f"rollout.plan: {error}") from error
        if getattr(etas, "shape", None) != (self.rollout.steps,) or not (etas >= 0).all():
            got = etas.tolist() if hasattr(etas, "tolist") else f"a {type(etas).__name__}"
            raise ConfigError(
                f"rollout.plan: '{self.rollout.plan.name}' gives {got}; it must give a noise level from 0 on "
                f"for each of {self.rollout.steps} steps"
            )
        if not silent and not (etas > 0).any():
            raise ConfigError(
                f"rollout.plan: '{self.rollout.plan.name}' with {self.rollout.steps} steps and eta "
                f"{self.rollout.eta} has no stochastic step to learn from; raise rollout.steps or rollout.eta"
            )
        return plan

    def noise(self) -> "tuple[Tensor, Tensor]":
        """Two masks [T] bool: steps that the plan makes stochastic, and steps where the kernel then adds noise."""
        # imported here, so that configurations are read without torch
        import torch

        from samplers import step_std

        sampling = self.rollout
        etas = self.build_plan(silent=True).etas(sampling.steps, sampling.eta, 0, 0)
        # any schedule will do: whether there is noise does not depend on it; ddim_published ends below the last level
        sigmas = torch.cat([torch.linspace(1, 0.1, sampling.steps), torch.zeros(1)])
        return etas > 0, step_std(self.build_kernel(), sigmas, etas) > 0

    def rows(self, processes: int) -> int:
        shared = self.model.context_parallel
        if processes % shared.degree:
            raise ConfigError(
                f"model.context_parallel: ulysses {shared.ulysses} x ring {shared.ring} processes share a sample, and "
                f"{processes} cannot be divided by that; a multiple of {shared.degree} processes works"
            )
        return processes // shared.degree

    def check_sampling(self, groups: int, algorithm: Method) -> None:
        self._check_lora()
        if self.model.embeddings is not None:
            check_output(Path(self.model.embeddings), "model.embeddings", folder=True)
        self._check_texts(algorithm)
        self._check_context_parallel()
        from samplers import check_eta

        kernel = self.build_kernel()
        plan = self.build_plan(silent=True)
        highest = getattr(plan, "maximum", None) or self.rollout.eta
        for where, eta in (("rollout.eta", self.rollout.eta), ("rollout.plan.maximum", highest)):
            try:
                check_eta(kernel, eta)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from error
        noiseless = algorithm.noise == "start" or (algorithm.noise == "kernel" and not self.noise()[1].any())
        if self.rollout.share_start_noise and noiseless:
            raise ConfigError(
                "rollout.share_start_noise: without noise on the way the samples of a group would all be the same; "
                "share_start_noise: false works"
            )
        if self.rollout.cache is not None:
            self._check_cache(self.rollout.cache, algorithm)
        if self.rollout.search is not None:
            self._check_search(self.rollout.search, algorithm)
        self._check_saved(algorithm)
        self._check_chunks()
        if self.rollout.guidance_gradient == "conditional" and self.rollout.guidance == 1:
            raise ConfigError(
                "rollout.guidance_gradient: without guidance (rollout.guidance: 1) there is no unconditional branch; "
                "leave it out"
            )
        self._check_steps("rollout", self.rollout)
        self._check_steps("evaluation", self.evaluation)
        if self.rollout.rlg != 1:
            raise ConfigError("rollout.rlg: a run learns from the samples of its own weights; evaluation.rlg works")

    def _check_steps(self, where: str, sampling: Sampling) -> None:
        """Refuse scales and noise levels that do not fit the steps, or would do nothing."""
        if sampling.guidance == 1 and (sampling.negative_prompt or sampling.guidance_2):
            raise ConfigError(
                f"{where}: negative_prompt and guidance_2 are of guidance, and {where}.guidance is 1, which is none"
            )
        if sampling.rlg_from and (sampling.rlg == 1 or sampling.rlg_from >= sampling.steps):
            raise ConfigError(
                f"{where}.rlg_from: "
                + (
                    "without rlg it does nothing; set rlg too"
                    if sampling.rlg == 1
                    else f"no step of {sampling.steps} is left for rlg; at most {sampling.steps - 1} works"
                )
            )
        if isinstance(sampling.guidance, list) and len(sampling.guidance) != sampling.steps:
            raise ConfigError(
                f"{where}.guidance: {len(sampling.guidance)} scales for {where}.steps={sampling.steps}; give one a "
                "step, or one number for all"
            )
        if sampling.sigmas is not None and len(sampling.sigmas) != sampling.steps:
            raise ConfigError(
                f"{where}.sigmas: {len(sampling.sigmas)} noise levels for {where}.steps={sampling.steps}; "
                "give one a step, without the final 0"
            )
        if sampling.sigmas is not None:
            check_levels(sampling.sigmas, f"{where}.sigmas")

    def _check_lora(self) -> None:
        """Refuse what takes a LoRA where there is none, or a merged one on quantised weights."""
        model = self.model
        if model.base_bits is not None and model.lora is None:
            raise ConfigError(
                "model.base_bits: quantised weights cannot be trained themselves; model.lora: {rank: 32} works"
            )
        if self.rollout.merge_lora and (model.lora is None or model.base_bits is not None):
            raise ConfigError("rollout.merge_lora: it takes a LoRA, on weights that are not quantised; false works")
        if self.rollout.merge_lora and self.rollout.search is not None:
            raise ConfigError("rollout.merge_lora: a search asks the network by itself, without merging; false works")

    def _check_search(self, search: RolloutSearch, algorithm: Method) -> None:
        if algorithm.settings.stochastic:
            raise ConfigError("rollout.search: a search makes its own noise; algorithm.stochastic: false works")
        if (self.rollout.overlap or 1) > 1:
            raise ConfigError("rollout.overlap: a search asks for rewards while it samples; overlap: 1 works")
        registry.check("searches", search.name, search.settings, "rollout.search")

    def _check_cache(self, cache: Named, algorithm: Method) -> None:
        cache.part("caches", "rollout.cache")
        replayed = self.training.old_log_prob == "replayed"
        if "search" not in algorithm.combines and not ("ratios" in algorithm.combines and replayed):
            why, works = (
                ("ratios compare", "training.old_log_prob: replayed works")
                if "ratios" in algorithm.combines
                else ("updates compare", "nft, raft and the others that match finished samples work")
            )
            raise ConfigError(
                f"rollout.cache: what a cache samples with is not what a replay computes, and {self.algorithm.name}'s "
                f"{why} the two; {works}"
            )
        if self.rollout.share_start_noise:
            raise ConfigError(
                "rollout.cache: the members of a group with one start noise leave one trajectory outside of the "
                "pipeline's call, where the cache is; share_start_noise: false works"
            )
        if self.rollout.search is not None:
            raise ConfigError("rollout.cache: a search samples without; rollout.search: null works")
        if self.model.compile:
            raise ConfigError(
                "rollout.cache: it goes on and off, and blocks are compiled once; model.compile: false works"
            )

    def _check_saved(self, algorithm: Method) -> None:
        """Refuse rollouts that a file cannot describe."""
        from samplers import KERNELS

        if not self.rollout.save_every:
            return
        missing = {
            f"'{self.algorithm.name}' learns from states that no whole trajectory leads to": (
                "whole" not in algorithm.combines or getattr(algorithm.settings, "flash", None) is not None
            ),
            f"the kernel '{self.rollout.kernel}' is none of flowalign's own": self.rollout.kernel not in KERNELS,
            "the order of the solver is 2": self.rollout.order != 1,
            "guidance has a scale for each step": isinstance(self.rollout.guidance, list),
            "a feature cache takes part (rollout.cache)": self.rollout.cache is not None,
            "a search finds the samples (rollout.search)": self.rollout.search is not None,
            "text encoders are trained (model.text_lora)": self.model.text_lora is not None,
            "groups of other weights stand in (data.replay)": self.data.replay is not None,
            "earlier weights sample (staleness)": bool(self.rollout.staleness),
        }
        why = next((why for why, is_missing in missing.items() if is_missing), None)
        if why is not None:
            raise ConfigError(f"rollout.save_every: a file cannot describe these rollouts: {why}; save_every: 0 works")

    def _check_chunks(self) -> None:
        """Refuse what continues, keeps or draws trajectories as if their samples were made as a whole."""
        if self.rollout.chunks == 1:
            return
        refused = {
            "rollout.share_start_noise: true": self.rollout.share_start_noise,
            "rollout.order: 2": self.rollout.order == 2,
            "rollout.cache": self.rollout.cache is not None,
            "rollout.save_every": bool(self.rollout.save_every),
            "data.replay": self.data.replay is not None,
            f"rollout.engine: {self.rollout.engine.name}": self.rollout.engine.served(self.model.kind) is not None,
        }
        for setting in (name for name, given in refused.items() if given):
            raise ConfigError(f"{setting}: it is of samples made as a whole, and rollout.chunks is more than 1")

    def _check_texts(self, algorithm: Method) -> None:
        """Refuse settings that do not work with trained text encoders."""
        if self.model.text_lora is None:
            return
        if self.model.embeddings is not None:
            raise ConfigError("model.embeddings: with text_lora they change in every update; null works")
        if self.model.offload_text:
            raise ConfigError("model.text_lora: text encoders are trained on the device; offload_text: false works")
        if self.model.lora is None and self.model.text_lora.denoiser:
            raise ConfigError("model.text_lora: the denoiser is not trained whole beside it; a model.lora works")
        if self.rollout.guidance_gradient == "conditional" or self.rollout.negative_prompt:
            raise ConfigError("model.text_lora: guidance_gradient: both and an empty negative_prompt work")

    def _check_context_parallel(self) -> None:
        """Refuse settings that do not work where processes share a sample."""
        if self.model.context_parallel.degree == 1:
            return
        if self.model.text_lora is not None:
            raise ConfigError("model.context_parallel: text encoders are not trained beside it; text_lora: null works")
        if (self.rollout.overlap or 1) > 1:
            raise ConfigError("model.context_parallel: rewards are told to all that share a sample; overlap: 1 works")
        if self.rollout.search is not None:
            raise ConfigError("model.context_parallel: a search asks its rewards in each process; search: null works")
        if self.rollout.cache is not None:
            raise ConfigError("rollout.cache: processes that share a sample (context_parallel) go without; null works")
