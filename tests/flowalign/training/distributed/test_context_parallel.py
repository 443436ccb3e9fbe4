"""Processes that share each sample's tokens, in copies and in shards, give the numbers of one; what is refused."""

import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion.context_parallel import BACKENDS, TokenParts, check_context_parallel
from flowalign.policies.diffusion.families import family_of
from flowalign.policies.settings import ContextParallel, Model
from tests.flowalign.training.distributed.test_processes import FSDP, alone, named_by_dotted_path, saved
from tests.flowalign.training.processes import together

__all__ = ["named_by_dotted_path"]

CLOSE = {1: 1e-5, 2: 1e-4}
"""share of an iteration's movement, after so many"""
CLOSE_DIRECT = {1: 5e-5, 2: 5e-4}
"""where gradients flow through two calls of the network: rounding, most of it without AVX-512 or by a ring of Ulysses;
in float64 the parts of a process are attention, as the test below shows"""
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
WAYS: dict[int, dict[str, tuple[dict[str, int], dict[str, str] | None]]] = {
    2: {
        "flux": ({"ulysses": 2}, None),
        "wan": ({"ring": 2}, None),
        "wan22_14b": ({"ulysses": 2}, FSDP),
    },
    4: {
        "flux": ({"ring": 2}, None),
        "wan": ({"ulysses": 2, "ring": 2}, FSDP),
    },
}
"""of each number of processes, how those that share a sample do it and the launch of each run"""


def prepare(
    folder: Path,
    name: str,
    shared: dict[str, int] | None = None,
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
    shared = shared or {}
    brightness = {"name": "flash_on_cpu:brightness"}
    video = "num_frames" in tiny.call
    values: dict[str, Any] = {
        "model": {
            "path": str(model),
            "lora": None if full else {"rank": 2, "alpha": 4},
            "encode": tiny.encode,
            "context_parallel": shared,
            "attention": "_native_flash" if "ring" in shared else None,
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
        made = {name: prepare(tmp_path / f"{count}{name}", name, *way, **RUNS[name]) for name, way in launches.items()}
        together(count, *made.values())
        for name, folder in made.items():
            close = CLOSE_FULL if RUNS[name].get("full") else CLOSE_DIRECT if RUNS[name].get("direct") else CLOSE
            far = {iteration: apart(folder, one[name], iteration) for iteration in close}
            assert all(far[iteration] < share for iteration, share in close.items()), (count, name, far)


def attend(rank: int, port: int, ring: int, ulysses: int, folder: Path) -> None:
    """Save how far this process's part of attention, computed twice, and of its gradients is from the whole's."""
    import flash_on_cpu

    assert flash_on_cpu.ATTENTION
    count = ring * ulysses
    place = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=place, rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    shared = TokenParts([], mesh).config
    shared.context_parallel_config.convert_to_fp32 = False
    generator = torch.Generator().manual_seed(0)
    query, key, value, weight = (torch.randn(2, 16, 4, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    whole = scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    expected = [whole, *torch.autograd.grad((whole * weight).sum(), inputs)]
    own = [x.detach().chunk(count, 1)[rank].clone().requires_grad_() for x in inputs]
    part = checkpoint(dispatch_attention_fn, *own, backend="_native_flash", parallel_config=shared, use_reentrant=False)
    got = [part, *torch.autograd.grad((part * weight.chunk(count, 1)[rank]).sum(), own)]
    far = [(x - y.chunk(count, 1)[rank]).abs().max() for x, y in zip(got, expected, strict=True)]
    torch.save(torch.stack(far).detach(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_a_part_of_the_tokens_attends_as_the_whole_does(tmp_path: Path, ring: int, ulysses: int) -> None:
    """With activations computed again, as gradient checkpointing has them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = torch.multiprocessing.start_processes
    start(attend, (port, ring, ulysses, tmp_path), nprocs=ring * ulysses, start_method="forkserver")
    for rank in range(ring * ulysses):
        assert torch.load(tmp_path / f"{rank}.pt").max() < 1e-14


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


def test_a_ring_is_refused_with_another_diffusers_than_the_one_it_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.__version__", "0.43.0")
    assert "its mend is for diffusers 0.42, and 0.43.0 is installed; ulysses works" in refused(
        "wan", 1, 2, "_native_cudnn"
    )


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
    # a search goes with methods that learn from finished samples
    config = load(
        recipe("tiny_sd3/nft" if "search" in override else "tiny_sd3/flow_grpo"),
        ["model.context_parallel.ulysses=2", override],
    )
    with pytest.raises(ConfigError, match=message):
        config.check(processes)
