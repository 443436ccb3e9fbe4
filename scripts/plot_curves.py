"""Held-out scores of runs over training, as curves and as a table: what docs/long-runs.md shows.

A curve is a method: the mean over its runs, which differ by their seeds, and a thin line for each of them. The shaded
band is the 95% interval of the mean that is due to the choice of the prompts, which all curves share.

    python scripts/plot_curves.py curves.png --runs online_dpo runs/online-* --runs flow_grpo runs/flow-*
    python scripts/plot_curves.py curves.png --by forwards reward_calls --runs ...     # a panel each
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

from flowalign.errors import FlowalignError
from flowalign.evaluation.scores import Evaluated, scores_of
from flowalign.evaluation.statistics import Estimate, estimate
from flowalign.runs.metrics import MetricsFile

matplotlib.use("Agg")
from matplotlib import pyplot

AXES = {"iteration": "iterations", "forwards": "network forwards in training", "reward_calls": "pictures scored"}
NORMAL = 1.96
"""Standard errors to each side of a 95% interval."""


@dataclass
class Run:
    """The E evaluations of a run, the first one before training."""

    spent: dict[str, list[int]]
    """[E] what training had taken, by each of `AXES`"""
    prompts: list[str]
    """[N] of the held-out samples"""
    scores: list[list[float]]
    """[E, N]"""

    @property
    def means(self) -> list[float]:
        """[E]"""
        return [fmean(scores) for scores in self.scores]


def read(folder: Path, score: str) -> Run:
    """A run's evaluations.

    Raises:
        FlowalignError: there are none, or they have no such score.
    """
    iterations = [line["iteration"] for line in MetricsFile(folder / "evaluations.jsonl").read()]
    if not iterations:
        raise FlowalignError(
            f"{folder}: no evaluations there; a run's folder is wanted, of a run with evaluation.prompts"
        )
    results = [Evaluated.read(scores_of(folder, iteration)) for iteration in iterations]
    if score not in results[0].parts:
        raise FlowalignError(f"{folder}: no score '{score}' there; it has {', '.join(results[0].parts)}")
    lines = {line["iteration"] + 1: line for line in MetricsFile(folder / "metrics.jsonl").read()}
    spent = {axis: [lines[i][axis] if i else 0 for i in iterations] for axis in ("forwards", "reward_calls")}
    scores = [result.parts[score] for result in results]
    return Run({"iteration": iterations, **spent}, results[0].prompts, scores)


def pooled(runs: Sequence[Run]) -> list[Estimate]:
    """[E] the mean over the runs of each evaluation that all of them had; its error is due to the prompts."""
    prompts = [prompt for run in runs for prompt in run.prompts]
    evaluations = zip(*(run.scores for run in runs), strict=False)
    estimates = (estimate([score for scores in both for score in scores], prompts) for both in evaluations)
    return [found for found in estimates if found is not None]


def table(methods: Mapping[str, Sequence[Run]]) -> str:
    """A row a run: its scores in percent, by iteration."""
    lines = []
    for name, runs in methods.items():
        for run in runs:
            cells = (f"{at}: {100 * mean:.0f}" for at, mean in zip(run.spent["iteration"], run.means, strict=True))
            spent = f"{run.spent['forwards'][-1]:,} forwards, {run.spent['reward_calls'][-1]:,} scored"
            lines.append(f"{name} | {' '.join(cells)} | {spent}")
    return "\n".join(lines)


def plot(methods: Mapping[str, Sequence[Run]], axes: Sequence[str], label: str, path: Path) -> None:
    """A panel for each of `axes`, in each a curve for each method."""
    figure, panels = pyplot.subplots(
        1, len(axes), figsize=(5.2 * len(axes), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes, panels[0], strict=True):
        for number, (name, runs) in enumerate(methods.items()):
            colour, estimates = f"C{number}", pooled(runs)
            x = [fmean(run.spent[axis][i] for run in runs) for i in range(len(estimates))]
            y = [100 * found.mean for found in estimates]
            off = [100 * NORMAL * (found.error or 0) for found in estimates]
            panel.plot(x, y, color=colour, linewidth=2, label=f"{name}, {len(runs)} seed{'s' * (len(runs) > 1)}")
            panel.fill_between(
                x, [a - b for a, b in zip(y, off, strict=True)], [a + b for a, b in zip(y, off, strict=True)],
                color=colour, alpha=0.12, linewidth=0,
            )  # fmt: skip
            for run in runs if len(runs) > 1 else ():
                panel.plot(run.spent[axis], [100 * mean for mean in run.means], color=colour, linewidth=0.6)
        panel.set_xlabel(AXES[axis])
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"{label} of held-out samples, %")
    panels[0][0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="a PNG file to write")
    parser.add_argument("--runs", nargs="+", action="append", required=True, metavar=("NAME", "RUN"), help="a curve")
    parser.add_argument("--by", nargs="+", choices=list(AXES), default=["iteration"], help="a panel each")
    parser.add_argument("--score", default="strict", help="a score of the reward, as in a run's scores/")
    given = parser.parse_args()
    methods = {name: [read(Path(run), given.score) for run in runs] for name, *runs in given.runs}
    print(table(methods))
    plot(methods, given.by, given.score, given.picture)


if __name__ == "__main__":
    main()
