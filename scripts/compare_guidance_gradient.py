"""What `rollout.guidance_gradient: conditional` saves, and what it learns, against `both`, on the shipped tiny SD3.

One process; times are its processor time, which waiting for a core does not count. For each seed the two train in
turn from the same weights on the same prompts and noises: for as many iterations, and on with `conditional` until it
has had the processor time of `both`. Strict pass is measured on held-out counting prompts, with the same guidance.

    OMP_NUM_THREADS=1 python scripts/compare_guidance_gradient.py --json figures.json
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: threads that wait sleep
import torch

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.config import load
from flowalign.training import Trainer

RECIPE = Path(__file__).parents[1] / "configs" / "tiny_sd3" / "flow_grpo_early.yaml"
BRANCHES = ("both", "conditional")


def build(branches: str, seed: int, folder: str, given: argparse.Namespace) -> Trainer:
    """A trainer of the recipe under guidance, its learning rate constant so that no iteration is the last."""
    sections: dict[str, dict[str, Any]] = {
        "rollout": {"guidance": given.guidance, "guidance_gradient": branches},
        "evaluation": {"guidance": given.guidance, "samples_per_prompt": given.pictures, "save_samples": 0},
        "training": {"prompts_per_iteration": given.prompts, "seed": seed, "previews": 0, "checkpoint_every": 0},
    }
    overrides = [f"{section}.{key}={value}" for section, own in sections.items() for key, value in own.items()]
    overrides += ["evaluation.where={category: [counting]}", "training.optimizer.schedule=constant", *given.overrides]
    return Trainer(load(RECIPE, [*overrides, f"output={folder}", f"name={branches}{seed}"]), progress=False)


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of some work."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cost(given: argparse.Namespace, folder: str) -> dict[str, float]:
    """An update's time on 64 actions under guidance, over a forward of the network on 64 samples; medians of turns."""
    trainers = {branches: build(branches, 0, folder, given) for branches in BRANCHES}
    work: dict[str, Callable[[], Any]] = {}
    for branches, trainer in trainers.items():
        experience = trainer.collect(trainer.groups.draw(0))
        assert isinstance(experience, ActionExperience)
        items = experience.items[:64]
        experience.advantage = torch.ones_like(experience.advantage)
        work[branches] = lambda own=trainer.learner, e=experience, i=items: own.update(e, i)
    rollout, policy = experience.rollout, trainer.policy
    [call] = rollout.conditions.gather(*items.unbind(1), apart=True)[:1]
    x = rollout.trajectory.latents[items[:, 0], items[:, 1]]
    work["forward"] = torch.no_grad()(lambda: policy.denoiser(x, **call))
    turns = [{name: seconds(once) for name, once in work.items()} for _ in range(given.turns + 1)][1:]
    forward = median(turn["forward"] for turn in turns)
    ratios = {name: median(turn[name] for turn in turns) / forward for name in BRANCHES}
    return {"forward_seconds": forward, **ratios}


def strict(trainer: Trainer) -> float:
    """Percent of held-out pictures that show all that their prompts ask for."""
    evaluated = trainer.evaluate()
    assert evaluated is not None
    return 100 * mean(evaluated.parts["strict"])


def learn(seed: int, folder: str, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Strict pass before and after training with both branches, and with one for as many iterations and as long."""
    figures: dict[str, dict[str, Any]] = {}
    for branches in BRANCHES:
        trainer = build(branches, seed, folder, given)
        own = figures[branches] = {"rewards": []}
        if branches == "both":
            own["before"] = strict(trainer)
        spent = 0.0
        while trainer.iteration < given.iterations or spent < figures["both"].get("seconds", 0.0):
            begin = time.process_time()
            own["rewards"].append(trainer.iterate()["reward/mean"])
            spent += time.process_time() - begin
            trainer.iteration += 1
            if trainer.iteration == given.iterations:
                own |= {"seconds": spent, "strict": strict(trainer)}
                half = own["rewards"][given.iterations // 2 :]
                print(f"seed {seed}, {branches}: mean reward of the second half {mean(half):.3f}, {own}", flush=True)
        if branches == "conditional":
            own |= {"iterations": trainer.iteration, "strict_equal_time": strict(trainer)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=16, help="per iteration, in groups of 8")
    parser.add_argument("--pictures", type=int, default=20, help="of each held-out prompt")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3, help="0 measures the cost alone")
    parser.add_argument("--turns", type=int, default=9, help="of measuring the cost of an update")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as model.lora=null")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {"cost": cost(given, folder), "seeds": []}
        print("update / forward:", {name: round(figures["cost"][name], 2) for name in BRANCHES}, flush=True)
        for seed in range(given.seeds):
            figures["seeds"].append(learn(seed, folder, given))
            if given.json:
                given.json.write_text(json.dumps(figures, indent=1))
    for name, branches, key in (
        ("both", "both", "strict"),
        ("conditional, as many iterations", "conditional", "strict"),
        ("conditional, as much time", "conditional", "strict_equal_time"),
    )[: 3 * given.seeds]:
        gains = [seed[branches][key] - seed["both"]["before"] for seed in figures["seeds"]]
        spread = f" +- {stdev(gains):.1f}" if len(gains) > 1 else ""
        print(f"{name}: strict pass {mean(gains):+.1f}{spread} points")


if __name__ == "__main__":
    main()
