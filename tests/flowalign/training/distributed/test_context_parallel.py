"""Processes that share each sample's tokens, in copies and in shards, give the numbers of one; what is refused."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.context_parallel import BACKENDS, check_context_parallel
from flowalign.policies.diffusion.families import family_of
from flowalign.policies.settings import ContextParallel, Model
from flowalign.tools.tiny_pipelines import PIPELINES, build
from tests.flowalign.training.distributed.test_processes import FSDP, alone, named_by_dotted_path, saved
from tests.flowalign.training.processes import together

__all__ = ["named_by_dotted_path"]

CLOSE = {1: 1e-5, 2: 1e-4}
"""share of an iteration's movement, after so many"""
CLOSE_FULL = {1: 1e-4, 2: 0.002}
"""of all weights, among which Adam enlarges what gradients near its epsilon differ by, as in test_processes"""
RUNS: dict[str, dict[str, Any]] = {
    # evaluated, with previews, which one process makes by itself
    "flux": {"looks": True},
    # its gradient flows through two calls of the network
    "wan": {"direct": True},
    # two networks, one of high and one of low noise, of which the reference is a copy
    "wan22_14b": {"full": True},
}
WAYS: dict[int, dict[str, dict[str, str] | None]] = {
    2: {"flux": None, "wan": None, "wan22_14b": FSDP},
    4: {"flux": None, "wan": FSDP},
}
"""numbers of processes, of which two share a sample, and the launch of each run"""


def prepare(
    folder: Path,
    name: str,
    ulysses: int = 1,
    launch: dict[str, str] | None = None,
    full: bool = False,
    direct: bool = False,
    looks: bool = False,
) -> Path:
    """A folder with the configuration of a small run of a tiny pipeline."""
    folder.mkdir(parents=True)
    tiny = PIPELINES[name]
    model = folder.parent / f"model-{name}"
    if not model.is_dir():
        build(name).save_pretrained(model)
    # a CPU's matrix products depend, in their last bits, on the batch: every process samples group by group
    sampling = {"steps": 2, "guidance": 2.0, "batch_size": 4} | tiny.call
    brightness = {"name": "recording:brightness"}
    video = "num_frames" in tiny.call
    values: dict[str, Any] = {
        "model": {
            "path": str(model),
            "lora": None if full else {"rank": 2, "alpha": 4},
            "encode": tiny.encode,
            "context_parallel": {"ulysses": ulysses},
        },
        "data": {"prompts": "shapes_train"},
        "rewards": [{"name": "per_frame", "reward": brightness, "frames": 2}] if video else [brightness],
        "algorithm": {"name": "flow_grpo"} | ({"kl_weight": 0.1} if full else {}),
        "rollout": sampling | {"eta": 0.7},
        "training": {
            "iterations": 2,
            "prompts_per_iteration": 2,
            "group_size": 4,
            "micro_batch_size": 2,
            "checkpoint_every": 1,
            # of which the network that no sample asked for must see nothing
            "optimizer": {"learning_rate": 1e-5 if full else 1e-3, "weight_decay": 0.1},
        },
        "output": str(folder),
        "name": "run",
    }
    if full:
        # drawn alike by those that share a sample
        values["training"]["subsample"] = {"share": 0.5}
    if direct:
        values["rewards"] = [{"name": "per_frame", "reward": {"name": "tiny_clip"}, "frames": 2}]
        values["algorithm"] = {"name": "draft", "last_steps": 2}
        values["rollout"] |= {"kernel": "ode"}
    if looks:
        values["evaluation"] = sampling | {"prompts": "shapes_heldout", "limit": 1, "save_samples": 1, "steps": 1}
        values["training"]["previews"] = 1
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "launch.yaml").write_text(yaml.safe_dump(launch or {}))
    return folder


def apart(folder: Path, other: Path, iteration: int) -> float:
    """How far two runs' weights are apart after an iteration, as a share of how far the second moves them."""
    before, after = (torch.cat([v.flatten() for v in saved(other, iteration=i).values()]) for i in (1, 2))
    mine, theirs = (
        torch.cat([v.flatten() for v in saved(run, iteration=iteration).values()]) for run in (folder, other)
    )
    return float((mine - theirs).norm() / (after - before).norm())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_share_samples_give_the_run_of_one(tmp_path: Path) -> None:
    one = {name: alone(prepare(tmp_path / f"1{name}", name, **kind)) for name, kind in RUNS.items()}
    for count, launches in WAYS.items():
        made = {
            name: prepare(tmp_path / f"{count}{name}", name, 2, launch, **RUNS[name])
            for name, launch in launches.items()
        }
        together(count, *made.values())
        for name, folder in made.items():
            close = CLOSE_FULL if RUNS[name].get("full") else CLOSE
            far = {iteration: apart(folder, one[name], iteration) for iteration in close}
            assert all(far[iteration] < share for iteration, share in close.items()), (count, name, far)


def refused(name: str, ulysses: int = 1, ring: int = 1, attention: str | None = None) -> str:
    """The line that says why a tiny pipeline's tokens cannot be divided so."""
    pipeline = build(name)
    family = family_of(type(pipeline).__name__)
    # a folder with the configuration files alone
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save_config(folder)
        getattr(pipeline, family.denoiser).save_config(Path(folder) / family.denoiser)
        with pytest.raises(ConfigError) as error:
            shared = ContextParallel(ulysses=ulysses, ring=ring)
            check_context_parallel(folder, Model(path=folder, attention=attention, context_parallel=shared))
    said = str(error.value)
    assert "\n" not in said
    return said


def test_what_a_pipeline_cannot_divide_is_refused_before_its_weights_are_read() -> None:
    assert "SD3Transformer2DModel of StableDiffusion3Pipeline cannot have its tokens divided" in refused("sd35", 2)
    # diffusers has a plan for it, whose masks do not fit the attention heads that a process has
    assert "LTXVideoTransformer3DModel of LTXPipeline cannot have its tokens divided" in refused("ltx", 2)
    assert "2 attention heads cannot be divided over 4 processes" in refused("wan", 4)
    assert "context_parallel.ring: not with model.attention: native; _native_cudnn" in refused("wan", ring=2)
    assert "context_parallel.ulysses: not with model.attention: xformers; native" in refused("wan", 2, 1, "xformers")
    with_a_backward_pass = _AttentionBackendRegistry._supports_context_parallel - {"sage", "sage_hub", "_native_npu"}
    assert set(BACKENDS) == with_a_backward_pass


@pytest.mark.parametrize(
    ("processes", "override", "message"),
    [
        (3, "training.seed=0", "ulysses 2 x ring 1 processes share a sample, and 3 .* multiple of 2"),
        (16, "training.prompts_per_iteration=4", "4 groups cannot be split over 8 processes .*; 8 would work"),
        (2, "rollout.search={name: best_of_n}", "a search asks its rewards in each process"),
        (2, "rollout.overlap=2", "rewards are told to all that share a sample; overlap: 1 works"),
    ],
)
def test_settings_that_do_not_go_with_shared_samples_are_refused(processes: int, override: str, message: str) -> None:
    config = load(recipe("tiny_sd3/flow_grpo"), ["model.context_parallel.ulysses=2", override])
    with pytest.raises(ConfigError, match=message):
        config.check(processes)
