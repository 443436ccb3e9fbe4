"""Processor time until a shipped tiny model passes held-out prompts more often: flow_grpo's own loop, and flowalign.

    OMP_NUM_THREADS=1 python scripts/time_to_score.py --json figures.json

The target is fixed before training: the strict pass of the base on held-out prompts, and --points above it.
Both ways have the same start weights and adapter, prompts in the same order, reward, noise levels and evaluation (the
same pictures' prompts and start noises, Euler's rule, 5 steps), and take turns of --every seconds of processor time in
one process, until both are there or have had --most, over which their learning rates fall to 0. The time of a way
counts its iterations alone, and is read off a line between its evaluations before and after the target; evaluations
cost neither anything.

- **flow_grpo's own loop**: written here after reading yifan123/flow_grpo (train_sd3.py, sd3_pipeline_with_logprob.py,
  sd3_sde_with_logprob.py): prompts encoded with every batch, noise at every step but the last, a start noise of each
  sample, samples without advantage left out, one step of a batch a network call in the update and a backward after
  each, two updates an iteration. Without KL and EMA, which would cost it time. --window 2 is its Flow-GRPO-Fast.
- **flowalign**: a recipe (--recipe) with --set overrides.

`--world spelling` races on the words of `tiny_speller`. Choose settings of both on seeds from 100 on.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: threads that wait sleep
import torch
from PIL.Image import Image
from torch import Generator, Tensor

from flowalign.config import load
from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from flowalign.evaluation.scores import evaluate
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training import Trainer
from flowalign.training.league import WORLDS
from rewards import Reward

RECIPES = Path(__file__).parents[1] / "configs" / "tiny_sd3"
SIGMAS, ETA = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]), 0.7


def build(recipe: str, seed: int, folder: str, given: argparse.Namespace) -> Trainer:
    """A trainer with what both ways have."""
    sections: dict[str, dict[str, Any]] = {
        "evaluation": {"steps": 5, "order": 1, "samples_per_prompt": given.pictures, "save_samples": 0},
        "training": {"seed": seed, "previews": 0, "checkpoint_every": 0},
    }
    overrides = [f"{section}.{key}={value}" for section, own in sections.items() for key, value in own.items()]
    overrides += ["evaluation.where={category: [counting]}", "training.optimizer.schedule=linear", *WORLDS[given.world]]
    own = given.set if recipe == given.recipe else []
    name = f"name={recipe}{seed}"
    return Trainer(load(RECIPES / f"{recipe}.yaml", [*overrides, *own, f"output={folder}", name]), progress=False)


class Published:
    """Flow-GRPO as its authors' scripts do it.

    Args:
        policy: whose pipeline and adapter it takes, and nothing else.
        prompts: to train on.
    """

    def __init__(self, policy: DiffusersPolicy, prompts: Prompts, reward: Reward, given: argparse.Namespace) -> None:
        self.pipeline: Any = policy.pipeline
        self.transformer = self.pipeline.transformer
        self.prompts, self.reward, self.given = prompts.texts, reward, given
        self.trained = [p for p in self.transformer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, betas=(0.9, 0.99), weight_decay=1e-4)
        self.draws = Generator()

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        options = {"do_classifier_free_guidance": False, "max_sequence_length": 0}
        tokens, _, pooled, _ = self.pipeline.encode_prompt(list(prompts), None, None, **options)
        return tokens, pooled

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[Image]:
        vae = self.pipeline.vae
        pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor)[0]
        pictures: list[Image] = self.pipeline.image_processor.postprocess(pixels, output_type="pil")
        return pictures

    def transition(
        self, x: Tensor, velocity: Tensor, step: int, following: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Their sde_step_with_logprob: the next state, and its log-probability [B]."""
        sigma, to, dt = SIGMAS[step], SIGMAS[step + 1], SIGMAS[step + 1] - SIGMAS[step]
        std = torch.sqrt(sigma / (1 - (SIGMAS[1] if sigma == 1 else sigma))) * ETA
        mean = x * (1 + std**2 / (2 * sigma) * dt) + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        if to == 0 and following is None:
            return x + velocity * dt, torch.zeros(len(x))
        spread = std * torch.sqrt(-dt)
        if following is None:
            following = mean + spread * torch.randn(mean.shape, generator=self.draws)
        density = -((following - mean) ** 2) / (2 * spread**2) - torch.log(spread) - math.log(2 * math.pi) / 2
        return following, density.flatten(1).mean(1)

    def noisy(self) -> range:
        """The steps of this iteration that are stochastic: all but the last, or a window in the first half."""
        size, last = self.given.window, len(SIGMAS) - 2
        if size is None:
            return range(last)
        start = int(torch.randint(0, max(1, last // 2 - size + 1), (), generator=self.draws))
        return range(start, start + size)

    @torch.no_grad()
    def sample(self, prompts: list[str], noisy: range) -> dict[str, Any]:
        """One batch: its states, log-probabilities and rewards."""
        tokens, pooled = self.encode(prompts)
        shape = (len(prompts), self.transformer.config.in_channels, *[self.transformer.config.sample_size] * 2)
        states, log_probs = [torch.randn(shape, generator=self.draws)], []
        for step in range(len(SIGMAS) - 1):
            x = states[-1]
            velocity = self.transformer(x, tokens, pooled, 1000 * SIGMAS[step].expand(len(x)))[0]
            if step in noisy:
                x, log_prob = self.transition(x, velocity, step)
            else:
                x, log_prob = x + velocity * (SIGMAS[step + 1] - SIGMAS[step]), torch.zeros(len(x))
            states.append(x)
            log_probs.append(log_prob)
        rewards = self.reward(self.decode(states[-1]), prompts, [{}] * len(prompts)).value
        columns = {"tokens": tokens, "pooled": pooled, "states": torch.stack(states, 1)}
        return columns | {"log_prob": torch.stack(log_probs, 1), "reward": rewards}

    def iterate(self, iteration: int, done: float, seed: int) -> None:
        """An epoch of theirs: sampling in batches, advantages, and two updates.

        Args:
            done: share of the training that came before.
        """
        given = self.given
        self.draws.manual_seed(1000 * seed + iteration)
        noisy = self.noisy()
        self.optimizer.param_groups[0]["lr"] = given.published_rate * max(0.0, 1 - done)
        groups = shuffled(len(self.prompts), iteration * given.prompts, given.prompts, seed)
        texts = [self.prompts[i] for i in groups for _ in range(given.group_size)]
        size = len(texts) // given.batches
        parts = [self.sample(texts[i : i + size], noisy) for i in range(0, len(texts), size)]
        samples = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        gap = samples["reward"].view(-1, given.group_size)
        gap = gap - gap.mean(1, keepdim=True)
        # over the deviation of all samples, as their `global_std`
        advantage = (gap.flatten() / (samples["reward"].std(correction=0) + 1e-4)).clamp(-5, 5)
        kept = (advantage != 0).nonzero().squeeze(1)
        order = kept[torch.randperm(len(kept), generator=self.draws)]
        for update in order.chunk(2):
            batches = update.chunk(given.batches // 2)
            for rows in batches:
                for step in noisy:
                    x = samples["states"][rows, step]
                    at = 1000 * SIGMAS[step].expand(len(rows))
                    velocity = self.transformer(x, samples["tokens"][rows], samples["pooled"][rows], at)[0]
                    _, log_prob = self.transition(x, velocity, step, samples["states"][rows, step + 1])
                    ratio = torch.exp(log_prob - samples["log_prob"][rows, step])
                    clipped = ratio.clamp(1 - given.published_clip, 1 + given.published_clip)
                    loss = torch.maximum(-advantage[rows] * ratio, -advantage[rows] * clipped).mean()
                    (loss / (len(batches) * len(noisy))).backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


@dataclass
class Way:
    """One of the two, as far as it has come."""

    policy: DiffusersPolicy
    iterate: Callable[[int, float], Any]
    """of its number, and the share of the training that came before"""
    most: float
    """seconds that the training takes, if it does not get there"""
    iterations: int = 0
    seconds: float = 0.0
    """of processor time, in iterations"""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """seconds and strict pass, in percent, at each evaluation"""

    def advance(self, seconds: float) -> None:
        """Train until so much more time is used up."""
        end = self.seconds + seconds
        while self.seconds < end:
            begin = time.process_time()
            self.iterate(self.iterations, self.seconds / self.most)
            self.seconds += time.process_time() - begin
            self.iterations += 1

    def reached(self, target: float) -> float | None:
        """Seconds to the target."""
        for (before, low), (after, high) in zip(self.curve, self.curve[1:], strict=False):
            if high >= target:
                return before + (after - before) * (target - low) / (high - low)
        return None


def race(seed: int, folder: str, given: argparse.Namespace) -> dict[str, Any]:
    """Both ways from the same start, in turns."""
    ways: dict[str, Way] = {}
    for name in given.ways:
        trainer = build("flow_grpo" if name == "published" else given.recipe, seed, folder, given)
        reward, settings = trainer.scorer.reward, trainer.config.evaluation
        if name == "published":
            published = Published(trainer.policy, trainer.prompts, reward, given)
            ways[name] = Way(trainer.policy, partial(published.iterate, seed=seed), given.most[0])
        else:
            ways[name] = Way(trainer.policy, partial(one_iteration, trainer), given.most[1])
    heldout = Prompts.of(settings)

    def strict(policy: DiffusersPolicy) -> float:
        evaluated = evaluate(policy, reward, heldout, settings, given.pictures, settings.seed)
        return 100 * mean(evaluated.parts["strict"])

    base = strict(next(iter(ways.values())).policy)
    target = base + given.points
    for way in ways.values():
        way.curve.append((0.0, base))
    while going := [
        (name, way) for name, way in ways.items() if way.reached(target) is None and way.seconds < way.most
    ]:
        for name, way in going:
            way.advance(given.every)
            way.curve.append((way.seconds, strict(way.policy)))
            done = f"{way.iterations} iterations, {way.seconds:.0f} s, {way.curve[-1][1]:.1f}%"
            print(f"seed {seed}, {name}: {done}", flush=True)
    return {"seed": seed, "base": base, "target": target} | {
        name: {"seconds": way.reached(target), "iterations": way.iterations, "curve": way.curve}
        for name, way in ways.items()
    }


def one_iteration(trainer: Trainer, iteration: int, done: float) -> None:
    """Of flowalign's trainer, without what stands around it."""
    trainer.iteration = iteration
    # read for the learning rate
    trainer.progress = lambda: done  # type: ignore[method-assign]
    trainer.iterate()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="online_dpo", help="of configs/tiny_sd3, for flowalign (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--world", default="shapes", choices=WORLDS, help="prompts, reward and model (%(default)s)")
    parser.add_argument("--points", type=float, default=6.0, help="of strict pass above the base (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["published", "flowalign"], choices=["published", "flowalign"])
    parser.add_argument("--pictures", type=int, default=15, help="of each held-out prompt (%(default)s)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between evaluations (%(default)s)")
    parser.add_argument(
        "--most",
        type=float,
        nargs=2,
        default=[300.0, 60.0],
        help="seconds for flow_grpo's loop and for ours %(default)s",
    )
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt, theirs (%(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="of an iteration of theirs (%(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="that they sample in, an even number (%(default)s)")
    parser.add_argument("--published-rate", type=float, default=2e-3, help="their learning rate (%(default)s)")
    parser.add_argument("--published-clip", type=float, default=1e-2, help="their clip range (%(default)s)")
    parser.add_argument("--window", type=int, help="their noisy steps, in the first half; default all but the last")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    given = parser.parse_args(argv)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            figures.append(race(seed, folder, given))
            if given.json is not None:
                settings = {name: value for name, value in vars(given).items() if name != "json"}
                given.json.write_text(json.dumps({"settings": settings, "seeds": figures}, indent=1))
    for name in given.ways:
        times = [seed[name]["seconds"] for seed in figures]
        shown = ", ".join("not reached" if own is None else f"{own:.0f} s" for own in times)
        print(f"{name}: {shown}")
    ratios = [
        seed["published"]["seconds"] / seed["flowalign"]["seconds"]
        for seed in figures
        if all(name in seed and seed[name]["seconds"] for name in ("published", "flowalign"))
    ]
    if ratios:
        spread = f" ± {stdev(ratios):.1f}" if len(ratios) > 1 else ""
        print(f"flowalign is there in 1/{mean(ratios):.1f}{spread} of the time")


if __name__ == "__main__":
    main()
