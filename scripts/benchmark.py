"""Measure what flowalign costs over the bare network: rollout and update efficiency, and peak memory.

    python scripts/benchmark.py                                    # the shipped tiny SD3
    python scripts/benchmark.py --model stabilityai/stable-diffusion-3.5-medium --dtype bfloat16 --size 512
    python scripts/benchmark.py --config FOLDER --dtype bfloat16   # a pipeline's configurations, random weights
    python scripts/benchmark.py --text                             # a GRPO step on texts beside TRL's

Two ratios, both of seconds measured in one process:

    rollout efficiency = bare forwards, as many as the rollout makes / DiffusersPolicy.sample
    update efficiency  = bare forward+backwards, as many as the update makes / Learner.update

The bare network is the same module with its LoRA adapter on, called back to back on inputs that lie ready; its
forward+backward has the mean square of the output for a loss. A rollout is everything from prompts whose
embeddings are cached to the recorded trajectory (kernel flow_sde); an update is everything from the stored
trajectory to the optimizer's step, over every stochastic step of the rollout in micro-batches of --batch-size
(sample, step) pairs. The measurements take turns, and each figure is the median over --repeats turns.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_text
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowalign.config import Config, load, recipe
from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.errors import FlowalignError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.draw import Draw
from flowalign.runs.environment import installed
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from flowalign.training.building import build_policy

TEXT_TOKENS = 77 + 256  # of a prompt in SD3: CLIP's, then T5's at its default length


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 2 or arguments.steps < 2 or arguments.repeats < 1:
        parser.error("--batch-size and --steps must be at least 2, and --repeats at least 1")
    if arguments.text and arguments.device == "cuda":
        parser.error("--text is measured on the CPU; --device cpu")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        figures = benchmark_text.benchmark(arguments) if arguments.text else benchmark(arguments)
    except (FlowalignError, OSError) as error:
        parser.error(str(error))
    (benchmark_text.print_tables if arguments.text else print_tables)(figures)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model", default="tiny_sd3", help="shipped model, a pipeline's folder, or a hub name (%(default)s)"
    )
    source.add_argument(
        "--config",
        help="folder or hub name of an SD3 pipeline of which only the configurations are read; its weights and "
        f"its prompt embeddings ({TEXT_TOKENS} tokens) are random, which takes the same time",
    )
    source.add_argument("--text", action="store_true", help="the shipped language model, beside TRL's GRPOTrainer")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        help="samples of the rollout, pairs of a micro-batch; with --text the texts of a step (%(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="denoising steps; all but the last are learned from (%(default)s)"
    )
    parser.add_argument(
        "--guidance", type=float, default=1.0, help="classifier-free guidance, 1 does without (%(default)s)"
    )
    parser.add_argument("--size", type=int, help="height and width of the pictures in pixels (the pipeline's own)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of the frozen weights and the forward pass (%(default)s)",
    )
    parser.add_argument("--rank", type=int, default=8, help="of the LoRA adapter (%(default)s)")
    parser.add_argument("--attention", help="diffusers attention backend: native, xformers, flash, ... (native)")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to run (cuda where there is one)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (OMP_NUM_THREADS, else every core)")
    parser.add_argument("--repeats", type=int, default=9, help="turns that the medians are over (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    return parser


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Set up one training run, take its parts in turns with the bare network, and return every figure."""
    with tempfile.TemporaryDirectory() as output:
        config = configuration(arguments, output)
        device = torch.device(arguments.device)
        policy = random_policy(arguments, device) if arguments.config else build_policy(config, device)
        trainer = Trainer(config, policy, progress=False)
    batch = draw_batch(trainer.prompts, 0, config.training.prompts_per_iteration, config.training.group_size, 0, False)
    if arguments.config:
        encode_at_random(policy, TEXT_TOKENS)
    experience = trainer.collect(Draw(trainer.sampler, trainer.scorer, batch))
    rollout, images = experience.rollout, trainer.sampler.decode(experience.rollout)
    policy.verify(rollout)
    # no advantage is zero, or the update would leave the action out
    experience = replace(experience, advantage=torch.ones_like(experience.advantage))
    pairs = next(trainer.learner.chunks(experience, 0))
    forwards, micro_batches = len(rollout.conditions.calls), len(pairs) // arguments.batch_size

    bare = bare_network(policy, rollout, pairs[: arguments.batch_size])
    parts: dict[str, Callable[[], object]] = {
        "bare_forwards": lambda: bare(forwards, backward=False),
        "rollout": lambda: trainer.sampler.rollout(batch),
        "decode": lambda: trainer.sampler.decode(rollout),
        "reward": lambda: trainer.scorer.score(images, batch),
        "bare_forward_backwards": lambda: bare(micro_batches, backward=True),
        "update": lambda: trainer.learner.update(experience, pairs),
    }
    seconds, memory = measure(parts, arguments.repeats, device)

    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "versions": installed(("flowalign", "torch", "diffusers", "transformers", "peft")),
        "settings": {**settings, "model": arguments.config or arguments.model, "threads": torch.get_num_threads()},
        "parameters": sum(p.numel() for p in policy.denoiser.parameters()),
        "network_calls": {"rollout": forwards, "update": micro_batches},
        "bare_seconds": {
            "forward": seconds["bare_forwards"] / forwards,
            "forward_backward": seconds["bare_forward_backwards"] / micro_batches,
        },
        "seconds": {name: seconds[name] for name in ("rollout", "decode", "reward", "update")},
        "efficiency": {
            "rollout": seconds["bare_forwards"] / seconds["rollout"],
            "rollout_and_decode": seconds["bare_forwards"] / (seconds["rollout"] + seconds["decode"]),
            "update": seconds["bare_forward_backwards"] / seconds["update"],
        },
        "peak_memory_gib": memory,
    }


def configuration(arguments: argparse.Namespace, output: str) -> Config:
    """The recipe of the tiny SD3 with the arguments' model and sizes: one iteration of one rollout batch."""
    group = 8 if arguments.batch_size % 8 == 0 else arguments.batch_size
    overrides = [
        f"output={output}",
        f"model.dtype={arguments.dtype}",
        f"model.lora={{rank: {arguments.rank}, alpha: {2 * arguments.rank}}}",
        f"model.attention={arguments.attention or 'null'}",
        f"rollout.steps={arguments.steps}",
        "rollout.sigmas=null",
        f"rollout.guidance={arguments.guidance}",
        f"rollout.batch_size={arguments.batch_size}",
        "rollout.plan={name: all}",
        f"training.prompts_per_iteration={arguments.batch_size // group}",
        f"training.group_size={group}",
        "training.updates_per_iteration=1",
        f"training.micro_batch_size={arguments.batch_size}",
        "training.optimizer={learning_rate: 1.0e-6}",
    ]
    if arguments.size is not None:
        overrides += [f"rollout.height={arguments.size}", f"rollout.width={arguments.size}"]
    if arguments.config is None and not (ASSETS / arguments.model).is_dir():
        overrides += [f"model.path={arguments.model}"]
        if DiffusionPipeline.load_config(arguments.model).get("text_encoder_3", [None])[0] is not None:
            overrides += ["model.encode={}"]
    return load(recipe("tiny_sd3/flow_grpo"), overrides)


def random_policy(arguments: argparse.Namespace, device: torch.device) -> DiffusersPolicy:
    """An SD3 pipeline of the configured sizes, without text encoders."""
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    networks = {
        name: kind.from_config(kind.load_config(arguments.config, subfolder=name)).to(dtype)
        for name, kind in {"transformer": SD3Transformer2DModel, "vae": AutoencoderKL}.items()
    }
    names = ("text_encoder", "tokenizer")
    absent = {name + suffix: None for name in names for suffix in ("", "_2", "_3")}
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(arguments.config, subfolder="scheduler")
    pipeline = StableDiffusion3Pipeline(scheduler=scheduler, **networks, **absent)
    return DiffusersPolicy(pipeline, device, attention=arguments.attention)


def encode_at_random(policy: DiffusersPolicy, tokens: int) -> None:
    """Let the policy's encoding give something of the right shape in the place of the text encoders'."""
    width, pooled = policy.denoiser.config.joint_attention_dim, policy.denoiser.config.pooled_projection_dim

    def encode(pipeline: Any, prompts: Sequence[str], **options: Any) -> dict[str, Tensor]:
        return {
            "prompt_embeds": torch.randn(len(prompts), tokens, width, dtype=policy.dtype),
            "pooled_prompt_embeds": torch.randn(len(prompts), pooled, dtype=policy.dtype),
        }

    # on the instance, where they hide the class's own; nothing is tokenised
    vars(policy.family).update(encode=encode, token_limits=lambda pipeline, **options: {})


def bare_network(policy: DiffusersPolicy, rollout: Rollout, pairs: Tensor) -> Callable[..., None]:
    """A function that calls the denoiser `count` times in a row on the inputs of these (sample, step) pairs."""
    samples, steps = pairs.unbind(1)
    calls = rollout.conditions.gather(samples, steps)
    x = rollout.trajectory.latents[samples, steps].to(policy.dtype)
    inputs = [x.repeat(copies, 1, 1, 1) for copies in rollout.conditions.copies]
    trainable = list(policy.trainable().values())

    def bare(count: int, backward: bool) -> None:
        for _ in range(count):
            for x, call in zip(inputs, calls, strict=True):
                with torch.set_grad_enabled(backward), policy._autocast():
                    output = policy.model(x, **call)[0]
                if backward:
                    output.float().square().mean().backward()
                    for parameter in trainable:
                        parameter.grad = None

    return bare


def measure(
    parts: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Run the parts in turns.

    Returns:
        Median seconds of each part, and peak memory in GiB: of each part as CUDA's allocator counts it, on the CPU
        the resident memory of the whole process.
    """
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    memory: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, run in parts.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            # the first turn warms up
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
    if device.type == "cpu":
        # kilobytes on Linux, bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory["process"] = peak / (2**30 if sys.platform == "darwin" else 2**20)
    return {name: statistics.median(values) for name, values in seconds.items()}, memory


def print_tables(figures: dict[str, Any]) -> None:
    """What was measured, for people."""
    settings, seconds, bare = figures["settings"], figures["seconds"], figures["bare_seconds"]
    calls, efficiency = figures["network_calls"], figures["efficiency"]
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{settings['model']} ({figures['parameters'] / 1e6:.1f}M, {settings['dtype']}), batch "
        f"{settings['batch_size']}, {settings['steps']} steps, guidance {settings['guidance']:g}; {figures['device']}"
    )
    table = Table()
    table.add_column("")
    for column in ("bare network", "flowalign", "efficiency"):
        table.add_column(column, justify="right")

    def row(name: str, count: int, one: float, ours: float, ratio: float) -> None:
        table.add_row(name, f"{count} x {one:.4f} s = {count * one:.3f} s", f"{ours:.3f} s", f"{ratio:.2f}")

    row("rollout", calls["rollout"], bare["forward"], seconds["rollout"], efficiency["rollout"])
    with_decode = seconds["rollout"] + seconds["decode"]
    row("rollout and VAE", calls["rollout"], bare["forward"], with_decode, efficiency["rollout_and_decode"])
    row("update", calls["update"], bare["forward_backward"], seconds["update"], efficiency["update"])
    console.print(table)
    total = sum(seconds.values())
    split = ", ".join(f"{name} {value:.3f} s ({value / total:.0%})" for name, value in seconds.items())
    console.print(f"an iteration of one such batch: {total:.3f} s: {split}")
    peaks = ", ".join(f"{name} {value:.2f} GiB" for name, value in figures["peak_memory_gib"].items())
    console.print(f"peak memory: {peaks}")


if __name__ == "__main__":
    main()
