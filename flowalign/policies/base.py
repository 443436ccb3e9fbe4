"""What every policy has: a network that is trained whole or by LoRA, and the weights that it started from."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from flowalign.errors import ConfigError, FlowalignError, nearest
from flowalign.policies.settings import SamplingSettings
from flowalign.policies.snapshots import Snapshots


@contextlib.contextmanager
def fitting_lora(setting: str, path: str | Path) -> Iterator[None]:
    """Say in one line why a LoRA cannot be put on a model, of which the libraries raise errors of all kinds.

    Args:
        setting: name of the setting, for people.

    Raises:
        ConfigError: names the setting and the path.
    """
    try:
        yield
    except (FlowalignError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        where = "" if Path(path).exists() else "it is not on this machine, and the hub gave none: "
        raise ConfigError(f"{setting}: no LoRA for this model at '{path}': {where}{said}") from error


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of a network's lists of modules that are in no other list: its layers."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else repeated_blocks(child)


TRAINED, START = "default", "start"
"""Names of the trained adapter, and of the given one that it started from."""
OWN = "trained"
"""Name of the trained adapter among paths of other adapters."""
GRAPHS = 64
"""Most compiled graphs of one class of blocks: for each kind, set of weights and size, with and without gradients."""
R = TypeVar("R")


class Policy(Generic[R]):
    """A network with adapters as diffusers and transformers models have them.

    Args:
        network: loaded network to train; frozen until `add_lora` or `train_all`.
        device: where it samples and trains.
    """

    def __init__(self, network: Any, device: torch.device | str) -> None:
        self.network = network
        self.device = torch.device(device)
        self.model: nn.Module = network
        """The network as the trainer wraps it, for calls with gradients; `network` outside distributed training."""
        self._bare: nn.Module = network
        """The network for calls without: a wrapper would wait for the other processes."""
        self.dtype: torch.dtype = network.dtype
        self.autocast: torch.dtype | None = None
        """Precision of the forward pass, where it is lower than that of the weights."""
        self.lora = False
        self.lora_config: LoraConfig | None = None
        """Settings of the trained adapter."""
        self.forwards = 0
        """Samples the network was evaluated on so far."""
        self._reference: nn.Module | None = None
        self.lora_path: str | None = None
        """Path of the adapter that training starts from, whose weights the reference has."""
        self._others: dict[str, str] = {}
        """Names on the network of further adapters, by their paths."""
        self.companions: dict[str, nn.Module] = {}
        """Further networks with adapters that are trained, by name; each process has them whole."""
        self.snapshots: Snapshots | None = None
        """Named copies of the trained weights, where a training keeps some."""
        network.requires_grad_(False).eval()

    @property
    def lora_targets(self) -> list[str]:
        """Module names that LoRA goes on unless others are named."""
        raise NotImplementedError

    @property
    def untrained(self) -> tuple[str, ...]:
        """Beginnings of the names of weights that the network cannot use, and that are not trained."""
        return ()

    def expect(self, coming: Callable[[], Sequence[str]]) -> None:
        """Be told how to ask for the prompts that come next; here there is nothing to prepare."""

    def add_lora(
        self, rank: int, alpha: float, targets: Sequence[str] | str | None = None, init: bool | str = True
    ) -> None:
        """Train a LoRA adapter; the reference is the same network with the adapter off.

        Args:
            targets: module names, or 'all-linear'; default `lora_targets`.
            init: peft's `init_lora_weights`, e.g. 'gaussian'.
        """
        targets = targets if isinstance(targets, str) else list(targets or self.lora_targets)
        # peft warns of a list of which nothing was a target
        dead = [name for name, _ in self.network.named_modules() if name.startswith(self.untrained)]
        ends = [name for name in dead if targets == "all-linear" or name.endswith(tuple(targets))]
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=targets, exclude_modules=ends or None, init_lora_weights=init
        )
        try:
            self.network.add_adapter(config)
        except ValueError as error:
            raise ConfigError(f"LoRA targets {targets} match nothing in the network: {error}") from error
        self.lora, self.lora_config = True, config
        cast_training_params(self.network, dtype=torch.float32)

    def start_from_lora(self, path: str | Path) -> None:
        """Train a LoRA adapter that starts from a trained one; the reference is the network with that one on.

        Args:
            path: a file, a folder or a hub name, as `load_lora_weights` of diffusers or peft reads it.

        Raises:
            ConfigError: there is none, or it does not fit the network.
        """
        # the first is never trained
        for name in (START, TRAINED):
            with fitting_lora("model.lora.path", path):
                self.read_lora(path, name)
                self.network.set_adapter(name)
            cast_training_params(self.network, dtype=torch.float32)
        self._freeze_untrained()
        self.lora, self.lora_config, self.lora_path = True, self.network.peft_config[TRAINED], str(path)

    def read_lora(self, path: str | Path, name: str) -> None:
        """Put a saved adapter on the network under a name."""
        raise NotImplementedError

    def train_all(self) -> None:
        """Train every weight, in float32; call `keep_reference` first where the algorithm needs the start weights."""
        self.network.requires_grad_(True).to(torch.float32)
        self._freeze_untrained()

    def _freeze_untrained(self) -> None:
        for name, parameter in self.network.named_parameters():
            if name.startswith(self.untrained):
                parameter.requires_grad_(False)

    def keep_reference(self) -> None:
        """Keep the start weights: nothing to do for LoRA, a frozen second copy for full fine-tuning."""
        if not self.lora:
            self._reference = copy.deepcopy(self.network).requires_grad_(False).to(self.dtype)

    def checkpoint_gradients(self) -> None:
        """Compute activations again in the backward pass instead of keeping them."""
        raise NotImplementedError

    def drop_unused(self) -> None:
        """Before an optimizer's step: take gradients from networks that no process asked; all processes call it."""

    def compile(self, **settings: Any) -> None:
        """Compile the network's repeated blocks, one graph for all that are alike; put nothing more on it after.

        Args:
            settings: settings of torch.compile.
        """
        # beyond torch's own limit of 8 a block runs uncompiled, without a word
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        for block in repeated_blocks(self.network):
            block.compile(**settings)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name to parameter, of what is trained."""
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it forwards do not count: they measure or show something."""
        forwards = self.forwards
        yield
        self.forwards = forwards

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the policy is the reference, for calls without gradients."""
        if self.lora_path is not None:
            self.network.set_adapter(START)
            try:
                yield
            finally:
                self.network.set_adapter(TRAINED)
            return
        if self.lora:
            self._switch_adapters(False)
            try:
                yield
            finally:
                self._switch_adapters(True)
            return
        if self._reference is None:
            raise FlowalignError("the reference weights were not kept; call keep_reference() before training")
        self._bare = self._reference
        try:
            yield
        finally:
            self._bare = self.network

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Within it the adapter that is on is added to copies of its weights, for calls without gradients that ask for
        no other weights; afterwards the weights are the same tensors as before."""
        layers, kept = [layer for layer in self._adapted if not layer.disable_adapters], []
        for layer in layers:
            parameters = list(layer.get_base_layer().parameters())
            kept += [(parameter, parameter.data) for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.data.clone()
            layer.merge()
        try:
            yield
        finally:
            for parameter, before in kept:
                parameter.data = before
            for layer in layers:
                layer.merged_adapters.clear()

    @contextlib.contextmanager
    def adapter(self, path: str | None) -> Iterator[None]:
        """Within it the policy is its base with one adapter on, for calls without gradients to weights.

        Args:
            path: path of a saved one, which is read once; 'trained' for its own; None: with none.

        Raises:
            ConfigError: there is none, or it does not fit the network.
        """
        name = None if path is None else self._adapter(path)
        self._put_on(name)
        try:
            yield
        finally:
            self._put_on(TRAINED if self.lora else None)

    @contextlib.contextmanager
    def strength(self, factor: float) -> Iterator[None]:
        """Within it the trained adapter counts `factor` times: 0 is the network without it, 1 the trained one.

        Raises:
            ConfigError: there is no adapter.
        """
        if not self.lora:
            raise ConfigError("a strength is of a LoRA, and this model has none")
        scaled = [layer.scaling for layer in self._adapted if TRAINED in layer.scaling]
        before = [scaling[TRAINED] for scaling in scaled]
        for scaling, value in zip(scaled, before, strict=True):
            scaling[TRAINED] = factor * value
        try:
            yield
        finally:
            for scaling, value in zip(scaled, before, strict=True):
                scaling[TRAINED] = value

    def _put_on(self, name: str | None) -> None:
        for layer in self._adapted:
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name)

    def _adapter(self, path: str) -> str:
        """The name on the network of a saved adapter."""
        if path == OWN:
            if not self.lora:
                raise ConfigError("rlg: 'trained' is the LoRA of the model, and this model has none; give a path")
            return TRAINED
        if path not in self._others:
            name = f"other{len(self._others)}"
            with fitting_lora("rlg", path):
                self.read_lora(path, name)
            self._others[path] = name
            # there are adapters where none were before, and what was read is on
            self.__dict__.pop("_adapted", None)
            self._put_on(TRAINED if self.lora else None)
        return self._others[path]

    def _switch_adapters(self, on: bool) -> None:
        for layer in self._adapted:
            layer.enable_adapters(on)

    @cached_property
    def _adapted(self) -> list[BaseTunerLayer]:
        """The layers that have an adapter: looked for once, since a search takes longer than a small network."""
        networks = [self.network, *self.companions.values()]
        return [module for network in networks for module in network.modules() if isinstance(module, BaseTunerLayer)]

    def snapshot(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Within it the policy has the weights of a named snapshot, for calls without gradients."""
        if self.snapshots is None or name not in self.snapshots.weights:
            raise FlowalignError(f"there is no snapshot '{name}' of the weights; training.snapshots makes some")
        return self.snapshots.use(name)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def set_autocast(self, dtype: str | None) -> None:
        """Compute in a lower precision than that of the weights; None: in theirs."""
        self.autocast = None if dtype is None else DTYPES[dtype]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision of the forward pass."""
        return self.autocast or self.dtype

    def bind(self, reward: object) -> None:
        """Lend the model to a reward that asks the one in training; only texts have such rewards."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        **settings: Any,
    ) -> Self:
        """Load a model from a folder or a hub name.

        Args:
            dtype: number format of the frozen weights and the forward pass, or its name.
            settings: further arguments of the class.

        Raises:
            ConfigError: there is no such model.
        """
        raise NotImplementedError

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what the library that the model comes from loads.

        Args:
            weights: the network's by name, where this process holds only a part of each; with LoRA the adapter's.
        """
        raise NotImplementedError

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, for sampling."""
        raise NotImplementedError

    def sample(self, prompts: Sequence[str], seeds: Sequence[int], *args: Any, **settings: Any) -> R:
        """Sample a trajectory of every prompt.

        Args:
            prompts: B prompts; repeat one for a group.
            seeds: B seeds.
            settings: `batch_size` (samples a network call, which does not change a sample), `metadata` (of the prompts;
                may name the pictures to start from), and the subclass's own.
        """
        raise NotImplementedError

    def verify(self, rollout: R) -> float:
        """Compare what a replay gives with what the rollout recorded, on a few samples; they do not count.

        Returns:
            The largest difference.

        Raises:
            FlowalignError: replay does not reproduce the rollout, so that this model cannot be trained.
        """
        raise NotImplementedError

    def decode(self, rollout: R, batch_size: int = 64) -> list[Any]:
        """The finished samples of a rollout: pictures, videos (lists of frames) or texts."""
        raise NotImplementedError

    def samples(self, rollout: R, batch_size: int, needs: frozenset[str], shown: bool = True) -> list[Any]:
        """The finished samples of a rollout, as rewards with these needs score them; here what `decode` returns.

        Args:
            shown: people look at them, whatever rewards need.
        """
        return self.decode(rollout, batch_size)

    def make(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        sampling: SamplingSettings,
        metadata: Sequence[Mapping[str, Any]] = (),
        needs: frozenset[str] = frozenset(),
    ) -> list[Any]:
        """A finished sample of every prompt; `needs` are those of the rewards that score them."""
        rollout = self.sample(prompts, seeds, metadata=metadata, **sampling.arguments())
        return self.samples(rollout, sampling.batch_size, needs)


def best_device() -> torch.device:
    """The accelerator that is there (CUDA, Apple's GPU, ...), else the CPU."""
    chip = torch.accelerator.current_accelerator(check_available=True)
    return chip or torch.device("cpu")


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        ConfigError: no network runs in one of this name.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ConfigError(f"dtype '{dtype}': {nearest(dtype, DTYPES)}")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype
