"""Measure flowalign at a model's real size, beside the published Flow-GRPO way of doing the same work, in turns.

    python scripts/benchmark_gpu.py sd35_medium --compile --json sd35.json
    python scripts/benchmark_gpu.py flux_dev --batch-size 4 --gradient-checkpointing
    python scripts/benchmark_gpu.py wan_1_3b --size 480 --batch-size 2 --attention flash     # 33 frames

The model has its published configuration and random weights, which take the same time; prompt embeddings are random
too, so no text encoder is loaded. Defaults: 512 pixels, 10 steps, guidance 4.5, batch 16, LoRA of rank 32, bfloat16.

- **Rollout**: from cached embeddings to the recorded trajectory. **Update**: replay, loss, backward, clipping and
  AdamW over every stochastic step. The decoder and the reward are not part of either.
- **Published**: a loop of our own, written after reading yifan123/flow_grpo (sd3_pipeline_with_logprob.py,
  sd3_sde_with_logprob.py and compute_log_prob of train_sd3.py): guidance as the pipeline guides, by two copies of the
  batch or two calls, one step's batch a network call in the update and a backward after each, each sample's noise level
  looked up from its timestep, eager. The same network, adapter and samples.
- **MFU**: floating-point operations of the network that the work takes (torch's counter, matrix products and
  attention), over the time, over the rate of a large matrix product in the same dtype measured before. What gradient
  checkpointing computes again is not counted.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmark import configuration, measure
from diffusers import DiffusionPipeline
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flowalign.data.batches import draw_batch
from flowalign.planning import published_pipelines, tiny_pipelines
from flowalign.planning.random_models import default_dtype
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.draw import Draw
from flowalign.runs.environment import installed
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer


@dataclass(frozen=True)
class Size:
    """A model at its published size, and a tiny pipeline of the same class for a test on a CPU."""

    published: str
    """in flowalign/planning/published_pipelines.json"""
    tiny: str
    """in flowalign/planning/tiny_pipelines.json"""
    encoded: dict[str, tuple[int, ...]]
    """shapes of a prompt's embeddings"""
    call: dict[str, int]
    """further arguments of the pipeline's call"""


SIZES = {
    # 128 tokens of T5, as the recipes encode, and 77 of CLIP
    "sd35_medium": Size("sd35_medium", "sd35", {"prompt_embeds": (205, 4096), "pooled_prompt_embeds": (2048,)}, {}),
    "flux_dev": Size("flux_dev", "flux", {"prompt_embeds": (128, 4096), "pooled_prompt_embeds": (768,)}, {}),
    "qwen_image": Size("qwen_image", "qwen_image", {"prompt_embeds": (64, 3584)}, {}),
    "wan_1_3b": Size("wan21_1_3b", "wan", {"prompt_embeds": (512, 4096)}, {"num_frames": 33}),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SIZES)
    parser.add_argument("--tiny", action="store_true", help="a small network of the same class, for tests")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", type=int, default=512, help="height and width in pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (%(default)s)")
    parser.add_argument("--guidance", type=float, default=4.5, help="guidance scale (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples, and pairs a micro-batch (%(default)s)")
    parser.add_argument("--rank", type=int, default=32, help="of the LoRA adapter (%(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--attention", help="our diffusers attention backend (native)")
    parser.add_argument("--compile", action="store_true", help="compile our denoiser's repeated blocks")
    parser.add_argument("--merge-lora", action="store_true", help="our rollouts add the LoRA to copies of the weights")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="for both")
    parser.add_argument("--repeats", type=int, default=5, help="turns that the medians are over (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --tiny tries the script")
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    figures = benchmark(arguments)
    print_table(figures)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every figure of ours and of the published way."""
    device, dtype, size = torch.device(arguments.device), getattr(torch, arguments.dtype), SIZES[arguments.model]
    encode = tiny_pipelines.PIPELINES[size.tiny].encode if arguments.tiny else {}
    policy = DiffusersPolicy(random_pipeline(arguments, device, dtype), device, encode, arguments.attention)
    # read by `configuration`: the model is given
    arguments.config = arguments.model
    with tempfile.TemporaryDirectory() as output:
        config = configuration(arguments, output)
        config.model.encode = encode
        config.rollout = config.rollout.model_copy(update=size.call)
        config.rollout.merge_lora = arguments.merge_lora
        config.model.gradient_checkpointing, config.model.compile = arguments.gradient_checkpointing, arguments.compile
        trainer = Trainer(config, policy, progress=False)
        # a fresh adapter is zero: then merging rounds nothing, and half of the adapter has no gradient
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
        # what the samples are worth is no part of the work measured, and decoding them takes memory
        trainer.sampler.decode = lambda rollout: [Image.new("RGB", (8, 8))] * len(rollout)
    training = config.training
    batch = draw_batch(trainer.prompts, 0, training.prompts_per_iteration, training.group_size, 0, False)
    if not arguments.tiny:
        encode_at_random(policy, size.encoded)
    experience = trainer.collect(Draw(trainer.sampler, trainer.scorer, batch))
    rollout = experience.rollout
    experience = replace(experience, advantage=torch.ones_like(experience.advantage))
    pairs = next(trainer.learner.chunks(experience, 0))
    published = Published(policy, rollout, arguments.guidance)
    agreement = published.disagreement()

    parts: dict[str, Callable[[], object]] = {
        "rollout": lambda: trainer.sampler.rollout(batch),
        "rollout_published": published.rollout,
        "update": lambda: trainer.learner.update(experience, pairs),
        "update_published": published.update,
    }
    rate = matmul_rate(device, dtype)
    work = {"rollout": count(published.rollout), "update": count(published.update)}
    seconds, memory = measure(parts, arguments.repeats, device)
    items = {"rollout": len(batch), "update": len(pairs)}
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": installed(("flowalign", "torch", "diffusers", "peft")),
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("json", "config")},
        "parameters": sum(p.numel() for p in policy.denoiser.parameters()),
        "matmul_flops_per_second": rate,
        "log_prob_disagreement": agreement,
        "flops": work,
        "seconds": seconds,
        "per_second": {name: items[name.partition("_")[0]] / value for name, value in seconds.items()},
        "mfu": {name: work[name.partition("_")[0]] / value / rate for name, value in seconds.items()},
        "faster": {name: seconds[f"{name}_published"] / seconds[name] for name in items},
        "peak_memory_gib": memory,
    }


def random_pipeline(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> DiffusionPipeline:
    """The pipeline, its networks made on the device; without text encoders where it has its published size."""
    size = SIZES[arguments.model]
    if arguments.tiny:
        return tiny_pipelines.build(size.tiny).to(dtype)
    torch.manual_seed(0)
    described = published_pipelines.PIPELINES[size.published]
    components = {
        name: None if name.startswith(("text_encoder", "tokenizer")) else part
        for name, part in described.components.items()
    }
    with default_dtype(dtype):
        pipeline = tiny_pipelines.assembled(
            replace(described, components=components), lambda name: published_pipelines.network(name, device)
        )
    # a network's last layer starts at zero, and then nothing has a gradient
    torch.nn.init.normal_(pipeline.transformer.proj_out.weight, std=0.02)
    return pipeline


def encode_at_random(policy: DiffusersPolicy, shapes: dict[str, tuple[int, ...]]) -> None:
    """Let the policy's encoding give something of these shapes in the place of the text encoders'."""

    def encode(pipeline: Any, prompts: Sequence[str], **options: Any) -> dict[str, Tensor]:
        return {name: torch.randn(len(prompts), *shape, dtype=policy.dtype) for name, shape in shapes.items()}

    # on the instance, where they hide the class's own; nothing is tokenised
    own = {"encode": encode, "encode_negative": encode, "token_limits": lambda pipeline, **options: {}}
    vars(policy.family).update(own)


class Published:
    """Flow-GRPO as its authors' scripts do it, on the network and the samples of a rollout of ours."""

    def __init__(self, policy: DiffusersPolicy, rollout: Rollout, guidance: float) -> None:
        self.policy, self.made, self.guidance = policy, rollout.trajectory, guidance
        self.network = policy.network
        self.calls = rollout.conditions.calls
        self.copies = rollout.conditions.copies
        self.sigmas = self.made.sigmas
        self.eta = 0.7
        # theirs is one too: LoRA's parameters are few
        self.optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-6)

    def velocity(self, x: Tensor, step: int) -> Tensor:
        """Guided, of one step's whole batch."""
        family = self.policy.family
        latents = family.pack(x).to(self.policy.dtype)
        with self.policy._autocast(), torch.compiler.set_stance("force_eager"):
            calls = zip(self.copies, self.calls[step], strict=True)
            outputs = [self.network(torch.cat([latents] * count), **call)[0] for count, call in calls]
        output = family.velocity(outputs, self.copies, self.guidance)
        return family.unpack(output, x.shape[2:]).float()

    def transition(self, x: Tensor, velocity: Tensor, step: int, following: Tensor | None) -> tuple[Tensor, Tensor]:
        """Their sde_step_with_logprob: the next state, and its log-probability [B]."""
        index = [step] * len(x)
        sigma, to = (self.sigmas[[k + n for k in index]].view(-1, *[1] * (x.dim() - 1)) for n in (0, 1))
        dt = to - sigma
        # infinite at 1, and close to it where a schedule starts just below
        finite = torch.where(10 * (1 - sigma) < 1 - to, to, sigma)
        std = torch.sqrt(sigma / (1 - finite)) * self.eta
        drift = std**2 / (2 * sigma)
        mean = x * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
        spread = std * torch.sqrt(-dt)
        if following is None:
            following = mean + spread * torch.randn_like(mean)
        density = -((following.detach() - mean) ** 2) / (2 * spread**2) - torch.log(spread) - math.log(2 * math.pi) / 2
        return following, density.flatten(1).mean(1)

    @torch.no_grad()
    def rollout(self) -> list[Tensor]:
        """All states of a fresh trajectory."""
        states = [torch.randn_like(self.made.latents[:, 0])]
        for step in range(len(self.sigmas) - 1):
            velocity = self.velocity(states[-1], step)
            states.append(self.transition(states[-1], velocity, step, None)[0])
        return states

    def update(self) -> None:
        """One optimizer step over all stochastic steps, a step's batch at a time."""
        steps = self.made.mask[0].nonzero().flatten().tolist()
        for step in steps:
            log_prob = self.log_prob(step)
            ratio = torch.exp(log_prob - self.made.log_prob[:, step])
            loss = torch.maximum(-ratio, -ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()
            (loss / len(steps)).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.trainable().values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log_prob(self, step: int) -> Tensor:
        """[B] of the stored next states under the current weights."""
        x, following = self.made.latents[:, step], self.made.latents[:, step + 1]
        return self.transition(x, self.velocity(x, step), step, following)[1]

    @torch.no_grad()
    def disagreement(self) -> float:
        """Largest difference between their log-probabilities of our stored steps and ours."""
        steps = self.made.mask[0].nonzero().flatten().tolist()
        return max(float((self.log_prob(k) - self.made.log_prob[:, k]).abs().max()) for k in steps)


def count(work: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products and attention in it."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, the best of several."""
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = [measure({"product": lambda: a @ b}, 1, device)[0]["product"] for _ in range(5)]
    return 2 * side**3 / min(times)


def print_table(figures: dict[str, Any]) -> None:
    """What was measured, for people."""
    settings = figures["settings"]
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{settings['model']} ({figures['parameters'] / 1e9:.2f}B, {settings['dtype']}), {settings['size']} pixels, "
        f"{settings['steps']} steps, guidance {settings['guidance']:g}, batch {settings['batch_size']}; "
        f"{figures['device']}, {figures['matmul_flops_per_second'] / 1e12:.1f} TFLOP/s in matrix products"
    )
    table = Table()
    for column in ("", "flowalign", "published way", "faster", "MFU", "MFU published", "peak GiB", "published"):
        table.add_column(column)
    units = {"rollout": "videos/s" if SIZES[settings["model"]].call else "images/s", "update": "samples x steps/s"}
    memory = figures["peak_memory_gib"]
    for name, unit in units.items():
        other = f"{name}_published"
        speed, mfu = figures["per_second"], figures["mfu"]
        peaks = [f"{memory[part]:.2f}" if part in memory else "-" for part in (name, other)]
        table.add_row(
            name,
            f"{speed[name]:.3g} {unit}",
            f"{speed[other]:.3g} {unit}",
            f"{figures['faster'][name]:.2f}x",
            *(f"{mfu[part]:.1%}" for part in (name, other)),
            *peaks,
        )
    console.print(table)


if __name__ == "__main__":
    main()
