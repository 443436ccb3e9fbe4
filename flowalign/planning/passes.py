"""How often a recipe sends a sample through its networks, counted in one small iteration of a tiny pipeline."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flowalign.config import Config
from flowalign.planning.dry_run import small_config, small_policy
from flowalign.planning.resources import without_warnings
from flowalign.policies.base import best_device
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.conditions import CallRecorder
from flowalign.policies.settings import ContextParallel
from flowalign.training import Trainer


@dataclass(kw_only=True)
class Passes:
    """How often a trajectory of an iteration goes through the networks, on average."""

    rollout: float = 0
    """Forward passes to sample and complete it; each branch of guidance is a pass."""
    update: float = 0
    """Forward passes in updates, recomputed ones included."""
    backward: float = 0
    decoded: float = 0
    """Pictures that are decoded from it, and scored."""
    differentiated: float = 0
    """Pictures that a reward's gradient goes through."""


def count(config: Config) -> Passes:
    """Passes of a trajectory, by one small iteration of the recipe with a tiny pipeline of its class."""
    with tempfile.TemporaryDirectory() as folder, without_warnings():
        small = _small(config, folder)
        policy = small_policy(small, False, best_device())
        trainer, counter = Trainer(small, policy, progress=False), PassCounter()
        for module in policy.networks.values():
            module.register_forward_hook(counter.forward, with_kwargs=True)
        counter.phase_of(trainer.learner, "learn", "update")
        mismatch = "update" if config.training.old_log_prob == "replayed" else "measurement"
        counter.phase_of(trainer.learner, "mismatch", mismatch)
        counter.phase_of(trainer.algorithm, "verify", "measurement")
        counter.leave_out_dry_calls(policy)
        counter.pictures_of(policy, "decode_latents", "decoded")
        counter.pictures_of(policy, "decode_pixels", "differentiated")
        trainer.iterate()
        samples = small.training.prompts_per_iteration * small.training.group_size
    return Passes(**{name: value / samples for name, value in vars(counter.passes).items()})


def _small(config: Config, folder: str) -> Config:
    """The recipe with one group of small pictures, and one pass of the network for each pass of the recipe."""
    small = small_config(config, folder, full=False)
    assert isinstance(small, Config)
    small.training.prompts_per_iteration, small.training.micro_batch_size = 1, 64
    small.model.gradient_checkpointing = small.model.compile = False
    small.model.dtype, small.model.autocast, small.model.base_bits = "float32", None, None
    small.model.lora = config.model.lora
    small.model.context_parallel = ContextParallel()
    return small


class PassCounter:
    """Counts what goes through networks and the VAE, by the phase of the iteration."""

    def __init__(self) -> None:
        self.passes, self.phase = Passes(), "rollout"

    def forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]
    ) -> None:
        """Hook of a network: count its rows, and those that a backward pass reaches later."""
        rows = len(args[0] if args else next(iter(kwargs.values())))
        if self.phase in ("rollout", "update"):
            self._add(self.phase, rows)
        first = next((leaf for leaf in output if isinstance(leaf, Tensor) and leaf.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _: self._add("backward", rows))

    def phase_of(self, target: object, method: str, phase: str) -> None:
        """Let the phase be this one while a method of an object runs."""
        original: Callable[..., Any] = getattr(target, method)

        def call(*args: object, **kwargs: object) -> object:
            with self._during(phase):
                return original(*args, **kwargs)

        setattr(target, method, call)

    def leave_out_dry_calls(self, policy: DiffusersPolicy) -> None:
        """Count no passes of calls for conditions alone, in which a network's hooks run and it does not."""
        original = policy.recorder

        @contextlib.contextmanager
        def recorder(guidance: float, dry: bool) -> Iterator[CallRecorder]:
            with self._during("conditions" if dry else self.phase), original(guidance, dry) as recorded:
                yield recorded

        setattr(policy, "recorder", recorder)  # noqa: B010

    def pictures_of(self, target: object, method: str, name: str) -> None:
        """Count the latents that a method of an object is given, under a field of `Passes`."""
        original: Callable[..., Any] = getattr(target, method)

        def call(latents: Tensor, *args: object) -> object:
            self._add(name, len(latents))
            return original(latents, *args)

        setattr(target, method, call)

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _add(self, name: str, rows: int) -> None:
        setattr(self.passes, name, getattr(self.passes, name) + rows)
