"""What `flowalign probe` says of runs whose end is known, as a table in Markdown.

python scripts/backtest_probe.py [NAME...]    # default all; minutes each on one CPU core
"""

import argparse
from collections.abc import Sequence
from typing import Any

from flowalign.app.cli.modules import quiet_libraries
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.probe import probe

FEWER = ["training.prompts_per_iteration=16"]
WIDE = "model.lora={rank: 32, alpha: 32, targets: all-linear}"
CASES: dict[str, tuple[str, str, list[str]]] = {
    "demo": ("climbs", "tiny_sd3/demo", FEWER),
    "dense_grpo, 5e-4": (
        "climbs",
        "tiny_sd3/dense_grpo",
        [*FEWER, WIDE, "training.updates_per_iteration=2", "training.optimizer.learning_rate=5e-4"],
    ),
    "grpo of texts": ("climbs", "tiny_lm/grpo", []),
    "nft": ("climbs", "tiny_sd3/nft", []),
    "demo, rate 1e-9": ("dead", "tiny_sd3/demo", [*FEWER, "training.optimizer.learning_rate=1e-9"]),
    "demo, constant reward": ("dead", "tiny_sd3/demo", [*FEWER, "rewards=[{name: 'backtest_probe:constant'}]"]),
    "demo, no noise": ("dead", "tiny_sd3/demo", [*FEWER, "rollout.eta=0"]),
    "grpo of texts, rate 1e-9": ("dead", "tiny_lm/grpo", ["training.optimizer.learning_rate=1e-9"]),
    "demo, rate 2e-2": ("collapses", "tiny_sd3/demo", [*FEWER, "training.optimizer.learning_rate=2e-2"]),
    "demo, all weights, 2e-4": (
        "unlearns from iteration 50 on",
        "tiny_sd3/demo",
        [*FEWER, "model.lora=null", "training.optimizer.learning_rate=2e-4"],
    ),
    "nft, 1e-3 constant": (
        "collapses at iteration 60",
        "tiny_sd3/nft",
        [*FEWER, WIDE, "training.optimizer.learning_rate=1e-3"],
    ),
    "grpo of texts, rate 1e-1": ("collapses", "tiny_lm/grpo", ["training.optimizer.learning_rate=1e-1"]),
}
"""Known end, recipe and changes of each run."""


def constant(samples: Sequence[Any], prompts: Sequence[str]) -> list[float]:
    """A reward that is the same for all samples."""
    return [1.0] * len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--iterations", type=int, default=8, help="of a trial")
    given = parser.parse_args()
    quiet_libraries()
    print("| run | known end | probe | gain of the trial | at four times the rate | canary | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in given.names or CASES:
        end, base, changes = CASES[name]
        try:
            found = probe(load(recipe(base), changes), iterations=given.iterations)
        except ConfigError as error:
            print(f"| {name} | {end} | refused: {error} | | | | |", flush=True)
            continue
        canary = "" if found.canary is None else f"{found.canary.gain:+}"
        cells = [name, end, found.verdict, f"{found.trial.gain:+}", f"{found.stress.gain:+}", canary]
        print(f"| {' | '.join(cells)} | {sum(found.seconds.values()):.0f} |", flush=True)


if __name__ == "__main__":
    main()
