"""Which mixture of data sets would score best, from the scores of runs with others (MoDoMoDo, arXiv 2505.24871).

python scripts/fit_mixture.py runs.jsonl

A line is a run: {"shares": {"maths": 1, "grounding": 3}, "score": 0.61}. A quadratic function of the shares is fitted
to the scores, with a ridge that keeps it from following noise, and its maximum looked for. The abstract was at hand,
which says that a model predicts scores from mixtures and not which. Prints the line for the configuration.
"""

import argparse
import json
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats = NDArray[np.float64]


def features(shares: Floats) -> Floats:
    """[N, F] of shares [N, K] that sum to 1: all products of two, of which linear ones are sums."""
    pairs = combinations_with_replacement(range(shares.shape[1]), 2)
    return np.stack([shares[:, i] * shares[:, j] for i, j in pairs], 1)


def fit(shares: Floats, scores: Floats, ridge: float) -> Floats:
    """[F] coefficients of the features, fitted to scores less their mean."""
    made = features(shares)
    return np.linalg.solve(made.T @ made + ridge * np.eye(made.shape[1]), made.T @ (scores - scores.mean()))


def best(coefficients: Floats, tasks: int, seed: int = 0) -> Floats:
    """[K] shares where the function is largest, from several starts."""
    starts = np.random.default_rng(seed).dirichlet(np.ones(tasks), 20)
    ends = [
        minimize(
            lambda shares: -float(features(shares[None])[0] @ coefficients),
            start,
            method="SLSQP",
            bounds=[(0, 1)] * tasks,
            constraints={"type": "eq", "fun": lambda shares: shares.sum() - 1},
        )
        for start in starts
    ]
    return np.asarray(min(ends, key=lambda end: end.fun).x)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="JSON lines of shares and scores")
    parser.add_argument("--by", default="task", help="key of the metadata that names the data set")
    parser.add_argument("--ridge", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    runs = [json.loads(line) for line in options.runs.read_text().splitlines() if line.strip()]
    tasks = sorted({task for run in runs for task in run["shares"]})
    if len(runs) <= len(tasks):
        parser.error(f"{options.runs}: {len(runs)} runs say too little about {len(tasks)} data sets; more work")
    shares = np.array([[run["shares"].get(task, 0.0) for task in tasks] for run in runs], dtype=np.float64)
    shares /= shares.sum(1, keepdims=True)
    scores = np.array([run["score"] for run in runs], dtype=np.float64)
    coefficients = fit(shares, scores, options.ridge)
    found = best(coefficients, len(tasks))
    named = {task: round(float(share), 3) for task, share in zip(tasks, found, strict=True) if share >= 5e-4}
    left = scores - scores.mean() - features(shares) @ coefficients
    predicted = float(features(found[None])[0] @ coefficients + scores.mean())
    print(f"predicted score {predicted:.4g}, best of the runs {scores.max():.4g}, error of the fit {left.std():.2g}")
    print("data.selection=" + json.dumps({"name": "shares", "by": options.by, "shares": named}))


if __name__ == "__main__":
    main()
