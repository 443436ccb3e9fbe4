"""Methods of search on the shipped tiny SD3: quality against network forwards.

Held-out prompts of the shapes world are searched with each method and budget, once with the checker itself as the
reward and once with the tiny CLIP preference model, which has gradients; the checker judges both: strict pass is the
share of best samples that show all that their prompts ask for. What is measured is kept in the JSON file, and a second
run goes on after it.

    OMP_NUM_THREADS=1 python scripts/compare_search.py --json figures.json --plot docs/images/search.png
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: threads that wait sleep
import matplotlib

from flowalign.data import ASSETS, Prompts
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.runs.files import write_atomically
from flowalign.search import Budget
from flowalign.search.run import build_methods, search
from rewards import score
from rewards.shapes.clip import TinyCLIP
from rewards.shapes.reward import ShapesReward

matplotlib.use("Agg")
from matplotlib import pyplot

SAMPLING = Sampling(steps=5, sigmas=[1.0, 0.8, 0.6, 0.4, 0.2], batch_size=64)
METHODS = {
    "checker": ["best_of_n", "ttsnap", "evosearch", "beam", "fk_steering"],
    "tiny CLIP": ["best_of_n", "ttsnap", "evosearch", "beam", "fk_steering", "das", "nrg", "dno"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    # whose scores differ by some units, not by tenths
    "tiny CLIP": {"fk_steering.strength": 1.0, "das.strength": 1.0, "nrg.strength": 0.3, "dno.learning_rate": 0.05}
}


def measure(
    policy: DiffusersPolicy, prompts: Prompts, kind: str, method: str, budget: int, seed: int
) -> dict[str, Any]:
    """What one method finds for all prompts with so many samples' forwards."""
    reward: Any = ShapesReward(strict_weight=0.5) if kind == "checker" else TinyCLIP()
    own = {key: value for key, value in SETTINGS.get(kind, {}).items() if key.startswith(f"{method}.")}
    begin = time.process_time()
    methods = build_methods([method], own)
    found = search(policy, prompts, methods, reward, SAMPLING, Budget("samples", budget), 1000 * seed, progress=False)
    seconds = time.process_time() - begin
    judged = score(ShapesReward(), [one.sample for one in found], prompts.texts, prompts.metadata)
    return {
        "reward": kind,
        "method": method,
        "budget": budget,
        "seed": seed,
        "strict": float(judged.parts["strict"].mean()),
        "score": mean(one.score for one in found),
        "forwards": mean(one.forwards for one in found),
        "calls": mean(one.reward_calls for one in found),
        "seconds": seconds / len(prompts),
    }


def spread(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def table(rows: list[dict[str, Any]]) -> str:
    """Strict pass by reward, method and budget, mean and standard deviation over seeds, in Markdown."""
    budgets = sorted({row["budget"] for row in rows})
    lines = ["| searched reward | method | " + " | ".join(f"{budget} samples" for budget in budgets) + " |"]
    lines.append("|---" * (len(budgets) + 2) + "|")
    for kind, method in dict.fromkeys((row["reward"], row["method"]) for row in rows):
        cells = []
        for budget in budgets:
            own = [r for r in rows if (r["reward"], r["method"], r["budget"]) == (kind, method, budget)]
            middle, deviation = spread([100 * row["strict"] for row in own]) if own else (0.0, 0.0)
            cells.append(f"{middle:.0f} ± {deviation:.0f}" if own else "")
        lines.append(f"| {kind} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Strict pass against forwards a prompt, one panel a searched reward."""
    figure, axes = pyplot.subplots(1, len(METHODS), figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, (kind, methods) in zip(axes, METHODS.items(), strict=True):
        for method in methods:
            own = [row for row in rows if row["reward"] == kind and row["method"] == method]
            points = []
            for budget in sorted({row["budget"] for row in own}):
                at = [row for row in own if row["budget"] == budget]
                points.append((mean(row["forwards"] for row in at), *spread([100 * row["strict"] for row in at])))
            if points:
                forwards, middle, deviation = zip(*points, strict=True)
                axis.errorbar(forwards, middle, deviation, marker="o", markersize=3, capsize=2, label=method)
        axis.set_xscale("log")
        axis.set_title(f"searched: {kind}")
        axis.set_xlabel("network forwards a prompt")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("strict pass, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts, spread over the list")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 4, 12], help="samples' forwards a prompt")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("search.json"))
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    policy = DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3", encode_options={"max_sequence_length": 0})
    prompts = Prompts.read("shapes_heldout").spread(given.prompts)
    rows: list[dict[str, Any]] = json.loads(given.json.read_text()) if given.json.is_file() else []
    known = {(row["reward"], row["method"], row["budget"], row["seed"]) for row in rows}
    for kind, methods in METHODS.items():
        for seed, budget, method in itertools.product(range(given.seeds), given.budgets, methods):
            # a gradient costs three samples' forwards
            enough = budget >= 3 or method not in ("das", "nrg")
            if (kind, method, budget, seed) not in known and enough:
                rows.append(measure(policy, prompts, kind, method, budget, seed))
                print(rows[-1], flush=True)
                write_atomically(given.json, json.dumps(rows, indent=1))
    print(table(rows))
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
