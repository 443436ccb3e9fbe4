"""Measure rollout and update of SD3.5-medium and FLUX.1-dev at real size beside Flow-GRPO's published way.

    python scripts/benchmark_gpu.py                    # SD3.5-medium, 512 pixels, 10 steps, guidance 4.5, batch 16
    python scripts/benchmark_gpu.py --model flux       # FLUX.1-dev, 12 billion weights
    python scripts/benchmark_gpu.py --set rollout.batch_size=8    # any key of flowalign's configuration
    python scripts/benchmark_gpu.py --tiny             # both, small, on a CPU in seconds: does the script work?

Weights and prompt embeddings are random, which takes the same time; the configurations are diffusers' public ones and
stand below. Both ways do the same work: the same network with a LoRA of the same rank on the same modules, the same
steps, guidance and KL term, all steps but the last learned from, gradients accumulated to one optimizer step.

    rollout     samples/s, from cached embeddings to the recorded trajectory
    pictures    images/s, the same and the VAE
    update      samples x steps/s, from stored trajectories to the optimizer's step
    MFU         FLOPs of the network's own operations, as torch.utils.flop_counter counts them in one forward (and
                backward) of one sample without recomputation, over the seconds and the matmul rate measured here

Seconds are medians over --repeats turns after one that warms up; peak memory is torch.cuda.max_memory_allocated with
only one of the two loaded. The published scripts keep SD3.5's weights in float32 under autocast; at 12 billion they
would not fit beside activations, so there they are bfloat16 (--peer-weights chooses).
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import torch
from benchmark import measure
from published_flow_grpo import PublishedFlowGRPO
from real_size_models import MODELS, RealModel, noise_levels
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowalign.config import Config, load, recipe
from flowalign.data import draw_batch
from flowalign.files import write_atomically
from flowalign.policies import DiffusersPolicy
from flowalign.training import Trainer

Parts = dict[str, Callable[[], object]]
"""what is measured, by name"""
TARGETS = {"rollout": 1.3, "update": 1.5}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="sd3", help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="both models in small, on whatever device there is")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a rollout (%(default)s)")
    parser.add_argument("--micro-batch", type=int, help="samples of a forward and backward of the update (8; FLUX 4)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (%(default)s)")
    parser.add_argument("--guidance", type=float, default=4.5, help="(%(default)s)")
    parser.add_argument("--size", type=int, default=512, help="height and width in pixels (%(default)s)")
    parser.add_argument("--rank", type=int, default=32, help="of the LoRA (%(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="(%(default)s)")
    parser.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute activations, in both ways (default: FLUX only)",
    )
    parser.add_argument("--peer-weights", choices=["bfloat16", "float32"], help="of the published way, see above")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of flowalign's configuration")
    parser.add_argument("--repeats", type=int, default=5, help="turns that the medians are over (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        small = {"batch_size": 4, "micro_batch": 2, "steps": 3, "size": 64, "rank": 2, "repeats": 1}
        vars(arguments).update(small)
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --tiny runs the script without one")
    if arguments.batch_size % 2 or arguments.steps < 2 or arguments.repeats < 1:
        parser.error("--batch-size must be even, --steps at least 2 and --repeats at least 1")
    diffusers.logging.set_verbosity_error()
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    figures = [benchmark(name, arguments) for name in (MODELS if arguments.tiny else [arguments.model])]
    for one in figures:
        print_table(one)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


def benchmark(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both ways one after the other, and how they compare."""
    model, device = MODELS[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = argparse.Namespace(**{k: v for k, v in vars(arguments).items() if k not in ("json", "model")})
    settings.micro_batch = arguments.micro_batch or model.micro_batch
    settings.peer_weights = arguments.peer_weights or model.published_weights
    if arguments.gradient_checkpointing is None:
        settings.gradient_checkpointing = model.checkpointing
    rate = matmul_rate(device, getattr(torch, arguments.dtype), 256 if arguments.tiny else 8192)
    figures: dict[str, dict[str, Any]] = {}
    with explained("the published way"):
        peer = published(model, settings, device)
        work, parameters = counted(peer, settings), sum(p.numel() for p in peer.frozen)
        parts = published_parts(peer, settings)
        del peer
        figures["published"] = taken(parts, settings, device)
    with explained("flowalign"), tempfile.TemporaryDirectory() as folder:
        figures["flowalign"] = taken(our_parts(model, settings, device, Path(folder)), settings, device)
    pairs = settings.batch_size * (settings.steps - 1)
    for way in figures.values():
        seconds = way["seconds"]
        way["per_second"] = {
            "rollout": settings.batch_size / seconds["rollout"],
            "pictures": settings.batch_size / (seconds["rollout"] + seconds["decode"]),
            "update": pairs / seconds["update"],
        }
        way["model_flop_utilisation"] = {part: work[part] / seconds[part] / rate for part in work}
    before, after = (figures[way]["per_second"] for way in ("published", "flowalign"))
    return {
        "model": model.name + (", tiny" if arguments.tiny else ""),
        "parameters": parameters,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {package: version(package) for package in ("flowalign", "torch", "diffusers", "peft")},
        "settings": vars(settings),
        "matmul_flops_per_second": rate,
        "flops": work,
        **figures,
        "faster": {part: after[part] / before[part] for part in after},
    }


@contextlib.contextmanager
def explained(way: str) -> Iterator[None]:
    """Out of memory is one line that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SystemExit(
            f"benchmark_gpu.py: {way} ran out of memory; lower --micro-batch, add --gradient-checkpointing, "
            "or lower --batch-size, in this order"
        ) from error


def taken(parts: Parts, settings: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds and peak memory of the parts, which are let go of after."""
    seconds, memory = measure(parts, settings.repeats, device)
    parts.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"seconds": seconds, "peak_memory_gib": memory}


def published(model: RealModel, settings: argparse.Namespace, device: torch.device) -> PublishedFlowGRPO:
    """The published way, ready to sample."""
    torch.manual_seed(0)
    transformer, vae, scheduler = model.build(settings.tiny, device, settings.peer_weights, "float32")
    dtype = getattr(torch, settings.dtype)
    embeds, pooled = (value.to(device)[None] for value in model.embeddings(transformer, dtype))
    side = settings.size // 2 ** (len(vae.config.block_out_channels) - 1)
    return PublishedFlowGRPO(
        transformer,
        vae,
        noise_levels(scheduler, settings.steps, (side // 2) ** 2, device),
        embeds.repeat(settings.batch_size, 1, 1),
        pooled.repeat(settings.batch_size, 1),
        (embeds, pooled),
        guidance=settings.guidance,
        size=settings.size,
        rank=settings.rank,
        targets=model.lora_targets,
        dtype=dtype,
        kl_weight=model.kl_weight,
    )


def published_parts(peer: PublishedFlowGRPO, settings: argparse.Namespace) -> Parts:
    """Its rollout, decoding and update."""
    if settings.gradient_checkpointing:
        peer.transformer.base_model.model.enable_gradient_checkpointing()
    states, log_probs = peer.rollout()
    advantage = torch.ones(settings.batch_size, device=states.device)
    return {
        "rollout": peer.rollout,
        "decode": lambda: peer.decode(states[:, -1]),
        "update": lambda: peer.update(states, log_probs, advantage, settings.micro_batch),
    }


def our_parts(model: RealModel, settings: argparse.Namespace, device: torch.device, folder: Path) -> Parts:
    """flowalign's rollout, decoding and update."""
    torch.manual_seed(0)
    transformer, vae, scheduler = model.build(settings.tiny, device, settings.dtype, settings.dtype)
    pipeline = model.pipeline(transformer=transformer, vae=vae, scheduler=scheduler, **model.absent)
    config = configuration(model, settings, folder)
    policy = DiffusersPolicy(pipeline, device, attention=config.model.attention)
    trainer = Trainer(config, policy, reward=no_reward, progress=False)
    batch = draw_batch(trainer.prompts, 0, config.training.prompts_per_iteration, config.training.group_size, 0, False)
    embeds, pooled = model.embeddings(transformer, policy.dtype)
    for prompt in {*batch.prompts, ""}:
        policy._embeddings[prompt, None] = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    experience = trainer.algorithm.collect(trainer.actor, batch)
    policy.verify(experience.rollout)
    # no advantage is zero, or the update would leave the action out
    experience = replace(experience, advantage=torch.ones_like(experience.advantage))
    pairs = next(trainer._updates(experience))
    assert len(pairs) == settings.batch_size * (settings.steps - 1)
    sums: dict[str, list[Tensor]] = defaultdict(list)
    return {
        "rollout": lambda: trainer.actor.rollout(batch),
        "decode": lambda: trainer.actor.decode(experience.rollout),
        "update": lambda: trainer._update(experience, pairs, sums),
    }


def no_reward(images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
    """Something for the trainer to hold; rewards are not measured here."""
    return [float(i) for i in range(len(images))]


def configuration(model: RealModel, settings: argparse.Namespace, folder: Path) -> Config:
    """The recipe of SD3.5 with the arguments' sizes: one iteration of one rollout, one update."""
    overrides = [
        f"output={folder}",
        "model.path=random",
        f"model.dtype={settings.dtype}",
        "model.encode={}",
        f"model.lora={{rank: {settings.rank}, alpha: {2 * settings.rank}, init: gaussian}}",
        f"model.gradient_checkpointing={str(settings.gradient_checkpointing).lower()}",
        # the published divergence is -dt, a step's share of the schedule, times the KL used here
        f"algorithm.kl_weight={model.kl_weight / settings.steps}",
        f"rollout.steps={settings.steps}",
        f"rollout.guidance={settings.guidance}",
        f"rollout.height={settings.size}",
        f"rollout.width={settings.size}",
        f"rollout.batch_size={settings.batch_size}",
        "evaluation.prompts=null",
        "training.prompts_per_iteration=1",
        f"training.group_size={settings.batch_size}",
        "training.updates_per_iteration=1",
        f"training.micro_batch_size={settings.micro_batch}",
        "training.optimizer={learning_rate: 1.0e-6, weight_decay: 1.0e-4}",
        "training.ema_decay=null",
    ]
    return load(recipe("sd3/flow_grpo"), overrides + settings.set)


def flops(run: Callable[[], object]) -> int:
    """What it takes, with attention as matrix products: counted on every device, and not recomputed going back."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def counted(peer: PublishedFlowGRPO, settings: argparse.Namespace) -> dict[str, int]:
    """FLOPs of the network in a rollout and in an update, from one sample's forward and backward."""
    x, row = peer.start(1), slice(0, 1)
    with torch.no_grad():
        forward = flops(lambda: peer.velocity(x, 0, row))
    both = flops(lambda: peer.velocity(x, 0, row).square().mean().backward())
    peer.optimizer.zero_grad()
    pairs = settings.batch_size * (settings.steps - 1)
    reference = forward if peer.kl_weight > 0 else 0
    return {"rollout": settings.batch_size * settings.steps * forward, "update": pairs * (both + reference)}


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of a large square matrix product on this device, the median of 20."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for turn in range(25):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 5:
            seconds.append(time.perf_counter() - begin)
    return 2 * side**3 / statistics.median(seconds)


def print_table(figures: dict[str, Any]) -> None:
    """What was measured, with the targets."""
    settings = figures["settings"]
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{figures['model']} ({figures['parameters'] / 1e9:.2f} billion weights), {settings['size']} pixels, "
        f"{settings['steps']} steps, guidance {settings['guidance']:g}, batch {settings['batch_size']}, micro-batch "
        f"{settings['micro_batch']}, LoRA rank {settings['rank']}, {settings['dtype']} (published: "
        f"{settings['peer_weights']} weights); {figures['device']}, "
        f"matmul {figures['matmul_flops_per_second'] / 1e12:.1f} TFLOP/s"
    )
    table = Table()
    for column in ("", "published", "flowalign", "ratio", "target"):
        table.add_column(column, justify="left" if column == "" else "right")
    units = {"rollout": "samples/s", "pictures": "images/s", "update": "samples x steps/s"}
    for part, unit in units.items():
        before, after = (figures[way]["per_second"][part] for way in ("published", "flowalign"))
        target = f">= {TARGETS[part]}" if part in TARGETS else ""
        table.add_row(f"{part}, {unit}", f"{before:.3g}", f"{after:.3g}", f"{figures['faster'][part]:.2f}", target)
    for part in ("rollout", "update"):
        shares = [f"{figures[way]['model_flop_utilisation'][part]:.1%}" for way in ("published", "flowalign")]
        table.add_row(f"{part}, MFU", *shares, "", "")
    peaks = [max(figures[way]["peak_memory_gib"].values()) for way in ("published", "flowalign")]
    if figures["device"] == "CPU":
        table.add_row("peak memory", "not measured", "on a CPU", "", "<= 1")
    else:
        table.add_row("peak memory, GiB", *(f"{peak:.2f}" for peak in peaks), f"{peaks[1] / peaks[0]:.2f}", "<= 1")
    console.print(table)


if __name__ == "__main__":
    main()
