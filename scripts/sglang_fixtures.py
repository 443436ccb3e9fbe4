"""Fixtures of sglang's rollout protocol, made by sglang's own classes on a CPU.

    pip download --no-deps sglang==0.5.23 -d WHEEL
    pip install msgspec    # in an environment of its own, beside flowalign
    python scripts/sglang_fixtures.py WHEEL/sglang-0.5.23-*.whl

The wheel is unpacked into a temporary folder and its modules are loaded without their packages' own `__init__`, which
want a GPU. Real are the request and answer classes, the slicing and serialising of answers, the transition with its
log-probability, the Euler scheduler, and the reading of LoRA files; the network is a function of state and level.
Written is `tests/flowalign/training/engines/sglang-0.5.23.safetensors`, with JSON in its metadata.
"""

import argparse
import importlib
import importlib.machinery
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.config import Lora
from flowalign.data import shipped
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training.engines.sglang import write_weights

OUT = Path(__file__).parents[1] / "tests/flowalign/training/engines/sglang-0.5.23.safetensors"
RUNTIME = "sglang.multimodal_gen.runtime"
REPLACED = [
    "fastapi",
    "sglang.multimodal_gen.configs.sample.sampling_params",
    f"{RUNTIME}.entrypoints.openai.utils",
    f"{RUNTIME}.entrypoints.utils",
    f"{RUNTIME}.pipelines_core.schedule_batch",
    f"{RUNTIME}.scheduler_client",
    f"{RUNTIME}.server_args",
    f"{RUNTIME}.utils.logging_utils",
]
"""Modules that have no part in what is recorded."""
STEPS, SHAPE, SEED = 4, (1, 4, 4, 4), 1234
KINDS: dict[str, dict[str, Any]] = {
    "sde": {"rollout_sde_type": "sde"},
    "sde_window": {"rollout_sde_type": "sde", "rollout_sde_step_indices": [1, 2]},
    "cps": {"rollout_sde_type": "cps", "rollout_sde_step_indices": [0, 1, 2]},
    "cps_last": {"rollout_sde_type": "cps"},
    "cps_published": {"rollout_sde_type": "cps", "rollout_log_prob_no_const": True},
    "ode": {"rollout_sde_type": "ode", "rollout_log_prob_no_const": True},
    "silent": {"rollout_sde_type": "sde", "rollout_debug_mode": False},
}


class Packages(importlib.machinery.PathFinder):
    """Finds the wheel's packages as empty ones, and its modules as they are."""

    root: Path

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        folder = cls.root / name.replace(".", "/")
        if name.partition(".")[0] == "sglang" and folder.is_dir():
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        return None


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """What stands for the network."""
    return torch.sin(3 * x) + sigma


def answer(settings: dict[str, Any]) -> tuple[str, bytes]:
    """A request as JSON, and the bytes of its answer."""
    api = importlib.import_module(f"{RUNTIME}.entrypoints.post_training.rollout_api")
    data = importlib.import_module(f"{RUNTIME}.post_training.rl_dataclasses")
    control = importlib.import_module(f"{RUNTIME}.post_training.flow_rollout_controller")
    schedulers = importlib.import_module(f"{RUNTIME}.models.schedulers.scheduling_flow_match_euler_discrete")
    request = api.RolloutRequest(
        prompt="a red square",
        seed=SEED,
        generator_device="cpu",
        width=32,
        height=32,
        num_inference_steps=STEPS,
        num_outputs_per_prompt=1,
        rollout_return_dit_trajectory=True,
        **settings,
    )
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    generators = [torch.Generator("cpu").manual_seed(request.seed)]
    latents = torch.randn(SHAPE, generator=generators[0])
    controller = control.FlowRolloutController(
        sde_type=request.rollout_sde_type,
        noise_level=request.rollout_noise_level,
        log_prob_no_const=request.rollout_log_prob_no_const,
        debug_mode=request.rollout_debug_mode,
        sde_step_indices=request.rollout_sde_step_indices,
        generator=generators,
        return_dit_trajectory=True,
        return_step_indices=request.rollout_return_step_indices,
        shard_for_sp=lambda batch, value: value,
        gather_for_sp=lambda batch, value: value,
        sigmas=scheduler.sigmas,
        latents_shape=SHAPE,
    )

    def transition(**arguments: Any) -> Tensor:
        moved: Tensor = controller.transition(batch=None, **arguments)
        return moved

    for step, timestep in enumerate(scheduler.timesteps):
        output = velocity(latents, scheduler.sigmas[step])
        latents = scheduler.step(output, timestep, latents, transition=transition, return_dict=False)[0]
    controller.record_trajectory_step(latents=latents, timestep_value=torch.zeros(()), step_index=STEPS)
    trajectory = data.RolloutTrajectoryData(
        rollout_log_probs=controller.collect_rollout_log_probs(),
        rollout_debug_tensors=controller.collect_rollout_debug_tensors(None) if request.rollout_debug_mode else None,
        dit_trajectory=data.RolloutDitTrajectory(
            latents=torch.stack(controller.step_latents, 1),
            timesteps=torch.stack(controller.step_timesteps),
            sigmas=scheduler.sigmas,
        ),
    )
    result = types.SimpleNamespace(
        output=torch.zeros(1, 3, 8, 8),
        metrics=types.SimpleNamespace(total_duration_s=0.5),
        peak_memory_mb=0,
        rollout_trajectory_data=trajectory,
    )
    responses = api._build_response("1", request.prompt, request.seed, True, result)
    body = api.msgspec.msgpack.encode([response.model_dump() for response in responses])
    return request.model_dump_json(), body


def lora() -> dict[str, Any]:
    """Names and alpha that sglang reads from a LoRA file of flowalign."""
    adapter = importlib.import_module(f"{RUNTIME}.pipelines_core.lora.format_adapter")
    peft = importlib.import_module(f"{RUNTIME}.pipelines_core.lora.peft_adapter")
    policy = DiffusersPolicy.from_pretrained(shipped("tiny_sd3"), encode_options={"max_sequence_length": 0})
    settings = Lora(rank=2, alpha=4)
    policy.add_lora(settings.rank, settings.alpha, settings.targets, settings.init)
    with tempfile.TemporaryDirectory() as folder:
        write_weights(policy, {name: value.detach() for name, value in policy.trainable().items()}, Path(folder))
        [file] = Path(folder).glob("*.safetensors")
        written = load_file(file)
        config = peft.load_peft_config(str(file))
        read = adapter.normalize_lora_state_dict(written, adapter_config=config)
        layers = sorted({name for name, module in policy.network.named_modules() if isinstance(module, LoraLayer)})
        return {"read": sorted(read), "layers": layers, "alpha": peft.get_peft_lora_alpha(config)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(parser.parse_args().wheel) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("sglang/multimodal_gen/")])
        Packages.root = Path(folder)
        sys.meta_path.insert(0, Packages)  # type: ignore[arg-type]
        sys.modules |= {name: MagicMock() for name in REPLACED}
        tensors, requests = {}, {}
        for kind, settings in KINDS.items():
            requests[kind], body = answer(settings)
            tensors[kind] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        classes = importlib.import_module(f"{RUNTIME}.entrypoints.post_training.io_struct")
        fields = {name: sorted(getattr(classes, name).model_fields) for name in ("RolloutRequest", "RolloutResponse")}
        about = {"requests": requests, "fields": fields, "lora": lora()}
    save_file(tensors, OUT, {"about": json.dumps(about)})
    print(f"{OUT}: {', '.join(KINDS)}")


if __name__ == "__main__":
    main()
