"""Learning with DeepSpeed's ZeRO (arXiv 1910.02054): gradients and moments in shards, with stage 3 weights too.

Where the launch configuration asks for it (`configs/accelerate/deepspeed_zero3.yaml`), DeepSpeed's engine takes the
network and the optimizer of any other run, for backward passes, steps and gathering. Forwards do not go through the
engine, which would switch autocast off in them. Checkpoints hold whole tensors, as everywhere.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import DeepSpeedPlugin
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from flowalign.algorithms.base import Algorithm
from flowalign.errors import ConfigError, FlowalignError
from flowalign.rollouts.base import Actor
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from flowalign.training.learner import Learner


class ZeroLearner(Learner):
    """A learner whose gradients, moments and with stage 3 weights DeepSpeed divides into shards.

    Args:
        settings: accelerate's; those under `zero_optimization` count.

    Raises:
        ConfigError: the algorithm has networks of its own, or the network computes in float16.
    """

    def __init__(self, algorithm: Algorithm, actor: Actor, settings: DeepSpeedPlugin) -> None:
        super().__init__(algorithm, actor)
        if self.scale:
            raise ConfigError(
                "model.dtype: float16 needs losses that are scaled, which goes without DeepSpeed only; bfloat16 works, "
                "or configs/accelerate/fsdp2.yaml"
            )
        if self.modules:
            raise ConfigError(
                f"{type(algorithm).__name__} trains networks of its own, which DeepSpeed would leave out; "
                "configs/accelerate/fsdp2.yaml works"
            )
        if algorithm.roles:
            raise ConfigError(
                f"{type(algorithm).__name__} trains several sets of weights, and DeepSpeed's engine one; "
                "configs/accelerate/fsdp2.yaml works"
            )
        import deepspeed

        self.partitioned = settings.zero_stage == 3
        self.replicated = not self.partitioned
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": self.config.training.optimizer.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            # a weight that stayed whole would not see what is written into its shards
            "zero_optimization": settings.deepspeed_config["zero_optimization"]
            | {"stage3_param_persistence_threshold": 0},
        }
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=self.policy.network, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        if self.partitioned:
            parameters: dict[str, Any] = self.parameters
            self.local_parameters = {name: nn.Parameter(p.ds_tensor.data) for name, p in parameters.items()}
            if self.ema is not None:
                self.ema = EMAModel(self.local_parameters.values(), self.config.training.ema_decay)
            self._keep_snapshots()

    @contextlib.contextmanager
    def _accumulated(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def _backpropagate(self, loss: Tensor) -> None:
        # what the engine's forward does first: the gradients of the pass before are complete
        self.zero.clear_backward_seen_flag()
        self.engine.backward(loss)

    def _step(self) -> Tensor:
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)
        if not torch.isfinite(norm):
            # the engine has moved the weights by it
            raise FlowalignError(
                f"the gradients' norm is {norm.item()}, and DeepSpeed does not skip such updates; --resume goes on "
                "from the last checkpoint, with a lower training.optimizer.learning_rate or model.dtype: float32"
            )
        return norm

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        if not self.partitioned:
            yield
            return
        hooks = self.zero.parameter_offload
        with self._together(self.policy.network.parameters()):
            # they would gather and release block by block, with the other processes
            hooks._remove_module_hooks()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            try:
                yield
            finally:
                hooks.setup_zero_stage3_hooks()

    def whole_weights(self) -> dict[str, Tensor] | None:
        if not self.partitioned:
            return None
        network = self.policy.network
        tensors = dict(network.named_parameters()) | dict(network.named_buffers())
        names = self.parameters if self.policy.lora else network.state_dict()
        with self.averaged():
            # a tied weight is listed by its first name
            return self._whole({name: tensors[name] for name in names if name in tensors})

    def _together(
        self, parameters: Iterable[Tensor], writer: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Within it every process has these parameters whole; what the process `writer` changes, all get."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer)

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of the network on the CPU, for the main process; all call this together."""
        kept = {}
        for name, tensor in tensors.items():
            with self._together([tensor]):
                if self.accelerator.is_main_process:
                    kept[name] = tensor.detach().cpu().clone()
        return kept

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        moments, rest = optimizer_tensors(self._moments())
        tensors, state = {"trainable": self._whole(self.parameters), "optimizer": moments}, {"optimizer": rest}
        if self.ema is not None:
            shadows = zip(self.parameters.items(), self.ema.shadow_params, strict=True)
            tensors["ema"] = {name: self._joined(shadow, p) for (name, p), shadow in shadows}
            state["ema_steps"] = self.ema.optimization_step
        for name, copies in self.snapshots.weights.items():
            parts = zip(self.parameters.items(), copies, strict=True)
            tensors[f"snapshot_{name}"] = {key: self._joined(part, p) for (key, p), part in parts}
        return tensors, state

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        self.load_weights(tensors, state)
        moments = optimizer_state(tensors["optimizer"], state["optimizer"])["state"]
        if moments:
            self._set_moments(moments)

    def load_weights(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in self.parameters.items():
            value = tensors["trainable"][name].to(parameter.device)
            with torch.no_grad(), self._together([parameter], writer=0):
                parameter.copy_(value)
            # the optimizer's own copy of its part
            safe_set_full_fp32_param(parameter, value)
        if self.ema is not None:
            self.ema.optimization_step = state["ema_steps"]
            for (name, parameter), shadow in zip(self.parameters.items(), self.ema.shadow_params, strict=True):
                shadow.copy_(self._part(tensors["ema"][name], parameter))
        for snapshot, copies in self.snapshots.weights.items():
            for (name, parameter), copy in zip(self.parameters.items(), copies, strict=True):
                copy.copy_(self._part(tensors[f"snapshot_{snapshot}"][name], parameter))

    def _moments(self) -> dict[str, Any]:
        """The state_dict that torch's optimizer would have of whole parameters; its tensors on the main process."""
        from deepspeed.utils import safe_get_full_optimizer_state

        count = len(self.parameters)
        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        moments: dict[str, Any] = {"state": {}, "param_groups": [group | {"params": list(range(count))}]}
        if not self.optimizer.state:
            return moments
        # of flat shards, of which all have the same entries
        shard, entries = next(iter(self.optimizer.state.items()))
        for index, parameter in enumerate(self.parameters.values()):
            values = {}
            for key, value in entries.items():
                of_weights = value.shape == shard.shape
                values[key] = safe_get_full_optimizer_state(parameter, key) if of_weights else value.clone()
            if self.accelerator.is_main_process:
                moments["state"][index] = {key: value.cpu() for key, value in values.items()}
        return moments

    def _set_moments(self, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
        """The inverse of `_moments`, into an optimizer that has not stepped yet."""
        from deepspeed.utils import safe_set_full_optimizer_state

        zero = self.zero
        shards = zero.fp32_partitioned_groups_flat if self.partitioned else zero.single_partition_of_fp32_groups
        for shard in shards:
            self.optimizer.state[shard] = {
                key: torch.zeros_like(shard) if value.dim() else value.clone() for key, value in moments[0].items()
            }
        if not self.partitioned:
            zero._lazy_init_hp_params_optimizer_state()
        for index, parameter in enumerate(self.parameters.values()):
            for key, value in moments[index].items():
                if value.dim():
                    safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)

    def _joined(self, part: Tensor, parameter: Any) -> Tensor:
        """A whole tensor from its parts, divided over the processes like this parameter; all call this together."""
        if not self.partitioned:
            return part
        parts = part.new_empty(part.numel() * self.accelerator.num_processes)
        torch.distributed.all_gather_into_tensor(parts, part)
        return parts[: parameter.ds_numel].view(parameter.ds_shape).cpu()

    def _part(self, whole: Tensor, parameter: Any) -> Tensor:
        """The inverse of `_joined`."""
        if not self.partitioned:
            return whole
        parts = whole.new_zeros(self.accelerator.num_processes, parameter.ds_tensor.numel())
        parts.view(-1)[: whole.numel()] = whole.flatten()
        return parts[self.accelerator.process_index]
