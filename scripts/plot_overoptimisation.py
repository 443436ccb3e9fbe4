"""A league's runs over time: the reward they train on beside the one that judges them, and what the watch said.

For leagues whose runs are evaluated on the way by another reward than their own, with a panel, so that the part
`trained` is measured: `--set evaluation.every=8 --set "evaluation.rewards=[...]" --set "evaluation.panel=[...]"`.

    python scripts/plot_overoptimisation.py runs/league                     # a table of all its runs
    python scripts/plot_overoptimisation.py runs/league --plot curves.png   # and the mean over seeds as curves
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

from flowalign.errors import FlowalignError
from flowalign.runs.metrics import MetricsFile
from flowalign.training.league import spread

matplotlib.use("Agg")
from matplotlib import pyplot

COLUMNS = ("trained on", "half way", "at the end", "judged", "half way", "at the end", "the watch")


@dataclass
class Run:
    """The E evaluations of a run, the first one before training."""

    forwards: list[int]
    """[E] that training had taken"""
    trained: list[float]
    """[E] the reward trained on, on held-out prompts"""
    judged: list[float]
    """[E] the reward that judges"""
    doubted: int | None
    """forwards when the watch first had a doubt"""

    @property
    def half(self) -> int:
        """The evaluation nearest to half of all forwards."""
        return min(range(len(self.forwards)), key=lambda i: abs(self.forwards[i] - self.forwards[-1] / 2))


def read(folder: Path, judged: str) -> Run:
    """A run's evaluations.

    Raises:
        FlowalignError: the run was not evaluated so.
    """
    taken = {line["iteration"] + 1: line["forwards"] for line in MetricsFile(folder / "metrics.jsonl").read()}
    lines = MetricsFile(folder / "evaluations.jsonl").read()
    for part in ("all/trained", judged):
        if part not in lines[0]:
            raise FlowalignError(
                f"{folder}: no '{part}' in its evaluations; evaluation.rewards and evaluation.panel give it"
            )
    forwards = [taken.get(line["iteration"], 0) for line in lines]
    doubts = [own for own, line in zip(forwards, lines, strict=True) if line["verdict"] in ("suspect", "hacked")]
    return Run(
        forwards, [line["all/trained"] for line in lines], [line[judged] for line in lines], min(doubts, default=None)
    )


def cell(values: Sequence[float]) -> str:
    """Mean and spread over seeds."""
    mean, deviation = spread(values)
    return f"{mean:.3f} ± {deviation:.3f}"


def table(league: Mapping[str, Sequence[Run]]) -> str:
    """A row a method: before training, half way and at the end; the highest judged score first."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, runs in sorted(league.items(), key=lambda entry: -fmean(run.judged[-1] for run in entry[1])):
        cells = []
        for series in ([(run.trained, run.half) for run in runs], [(run.judged, run.half) for run in runs]):
            cells.append(f"{fmean(values[0] for values, _ in series):.3f}")
            cells.append(cell([values[half] for values, half in series]))
            cells.append(cell([values[-1] for values, _ in series]))
        doubts = [run.doubted for run in runs if run.doubted is not None]
        said = f"{len(doubts)} of {len(runs)} runs, from {min(doubts):,} forwards on" if doubts else ""
        lines.append(f"| `{name}` | " + " | ".join([*cells, said]) + " |")
    return "\n".join(lines)


def plot(league: Mapping[str, Sequence[Run]], label: str, path: Path) -> None:
    """A curve a method, through the means over seeds of its evaluations; a dot marks its end."""
    figure, axis = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    colours = pyplot.get_cmap("tab20")
    for number, (name, runs) in enumerate(league.items()):
        # seeds of a method are evaluated after the same iterations, but for a last one that the budget decides
        evaluations = min(len(run.trained) for run in runs)
        x, y = (
            [fmean(series[i] for series in seeds) for i in range(evaluations)]
            for seeds in ([run.trained for run in runs], [run.judged for run in runs])
        )
        axis.plot(x, y, color=colours(number), linewidth=1.2)
        axis.plot(x[-1], y[-1], "o", color=colours(number), label=name)
    axis.set_xlabel("the reward trained on, held-out prompts")
    axis.set_ylabel(f"the reward that judges ({label})")
    axis.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("league", type=Path, help="the folder that flowalign league wrote")
    parser.add_argument("--judged", default="all/strict", help="of the evaluations")
    parser.add_argument("--plot", type=Path, help="a PNG file")
    given = parser.parse_args()
    league: dict[str, list[Run]] = defaultdict(list)
    for folder in sorted(given.league.glob("*-seed*")):
        if (folder / "league.json").is_file():
            league[re.sub(r"-seed\d+$", "", folder.name)].append(read(folder, given.judged))
    print(table(league))
    if given.plot is not None:
        plot(league, given.judged, given.plot)


if __name__ == "__main__":
    main()
