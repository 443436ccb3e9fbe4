"""What `flowalign probe` says of runs whose end is known, as a table in Markdown.

python scripts/backtest_probe.py [NAME...]    # default all; minutes each on one CPU core
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowalign.app.cli.modules import quiet_libraries
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.probe import probe
from flowalign.planning.probed import Verdict

FEWER = ["training.prompts_per_iteration=16"]
WIDE = "model.lora={rank: 32, alpha: 32, targets: all-linear}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose end is known."""

    end: str
    """What became of it, in words."""
    expected: Verdict
    recipe: str
    changes: Sequence[str] = ()
    iterations: int = 8
    """Iterations of a trial."""
    prompts: int = 48
    """Prompts on which a trial is judged."""


CASES: dict[str, Case] = {
    "grpo of texts": Case(end="climbs", expected="it learns", recipe="tiny_lm/grpo", iterations=20),
    "grpo of texts, rate 1e-9": Case(
        end="dead",
        expected="it is dead",
        recipe="tiny_lm/grpo",
        changes=["training.optimizer.learning_rate=1e-9"],
    ),
    "grpo of texts, rate 1e-1": Case(
        end="far too high",
        expected="it does harm",
        recipe="tiny_lm/grpo",
        changes=["training.optimizer.learning_rate=1e-1"],
    ),
    "nft, 1e-3": Case(
        end="climbs, collapses after iteration 45",
        expected="it does harm",
        recipe="tiny_sd3/nft",
        changes=[*FEWER, WIDE, "training.optimizer.learning_rate=1e-3"],
    ),
    "nft, 2e-4, kl_weight 0.1": Case(
        end="climbs",
        expected="it learns",
        recipe="tiny_sd3/nft",
        changes=[*FEWER, WIDE, "training.optimizer.learning_rate=2e-4", "algorithm.kl_weight=0.1"],
    ),
    "short_flow_grpo, all weights, 2e-4": Case(
        end="climbs, unlearns after iteration 50",
        expected="it does harm",
        recipe="tiny_sd3/short_flow_grpo",
        changes=[*FEWER, "model.lora=null", "training.optimizer.learning_rate=2e-4"],
    ),
    "short_flow_grpo": Case(
        end="climbs", expected="it learns", recipe="tiny_sd3/short_flow_grpo", changes=FEWER, iterations=12
    ),
    "dense_grpo, 5e-4": Case(
        end="climbs",
        expected="it learns",
        recipe="tiny_sd3/dense_grpo",
        changes=[*FEWER, WIDE, "training.updates_per_iteration=2", "training.optimizer.learning_rate=5e-4"],
    ),
    "dense_grpo, 5e-4, three times the iterations": Case(
        end="climbs",
        expected="it learns",
        recipe="tiny_sd3/dense_grpo",
        changes=[*FEWER, WIDE, "training.updates_per_iteration=2", "training.optimizer.learning_rate=5e-4"],
        iterations=24,
    ),
    "short_flow_grpo, rate 1e-9": Case(
        end="dead",
        expected="it is dead",
        recipe="tiny_sd3/short_flow_grpo",
        changes=[*FEWER, "training.optimizer.learning_rate=1e-9"],
        iterations=4,
        prompts=24,
    ),
    "short_flow_grpo, constant reward": Case(
        end="dead",
        expected="it is dead",
        recipe="tiny_sd3/short_flow_grpo",
        changes=[*FEWER, "rewards=[{name: 'backtest_probe:constant'}]"],
        iterations=4,
        prompts=24,
    ),
    "short_flow_grpo, no noise": Case(
        end="dead", expected="it is dead", recipe="tiny_sd3/short_flow_grpo", changes=[*FEWER, "rollout.eta=0"]
    ),
    "short_flow_grpo, rate 2e-2": Case(
        end="far too high",
        expected="it does harm",
        recipe="tiny_sd3/short_flow_grpo",
        changes=[*FEWER, "training.optimizer.learning_rate=2e-2"],
        iterations=6,
        prompts=24,
    ),
}


def constant(samples: Sequence[Any], prompts: Sequence[str]) -> list[float]:
    """A reward that is the same for all samples."""
    return [1.0] * len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    quiet_libraries()
    print("| run | known end | probe | gain of the trial | at four times the rate | canary | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in given.names or CASES:
        case = CASES[name]
        start = time.perf_counter()
        try:
            found = probe(load(recipe(case.recipe), list(case.changes)), case.iterations, case.prompts)
        except ConfigError as error:
            print(f"| {name} | {case.end} | refused: {error} | | | | |", flush=True)
            continue
        told = {"cannot tell": "", case.expected: ": hit"}.get(found.verdict, ": miss")
        canary = "" if found.canary is None else f"{found.canary.gain:+}"
        trials = [f"{found.trial.gain:+}", f"{found.stress.gain:+}", canary]
        if found.own_fit is not None:
            trials[2] += f"; fitted to its own samples: moved {found.own_fit.moved}, {found.own_fit.gain:+}"
        cells = [name, case.end, f"{found.verdict}{told}", *trials]
        print(f"| {' | '.join(cells)} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
