"""Forecasts of the first half of stored curves beside how they went on, as tables in Markdown.

The curves are those of docs/long-runs.md: strict pass on held-out prompts in percent; the one of 720 iterations is of
`flowalign train tiny_sd3/long_flow_grpo training.seed=100 training.iterations=720 evaluation.every=60
training.optimizer.learning_rate=5e-4`.

The second table is of the time to each of `TARGETS` that the first half has not reached. A noisy curve passes a score
between the evaluation before the first one that is as high, and the one from which on all are. A forecast is a hit if
its interval has a common iteration with that span, or, of a score that is never reached, if it goes beyond the end.

    python scripts/backtest_forecast.py
"""

import math

from flowalign.evaluation.forecast import forecast

CURVES: dict[str, tuple[int, list[float]]] = {
    "180 iterations, seed 0": (15, [50, 55, 69, 67, 76, 75, 74, 78, 80, 80, 78, 76, 76]),
    "180 iterations, seed 1": (15, [50, 60, 71, 72, 72, 73, 73, 76, 66, 74, 82, 85, 83]),
    "180 iterations, seed 2": (15, [50, 63, 72, 70, 78, 80, 82, 82, 83, 83, 81, 86, 83]),
    "360 iterations, seed 100": (30, [50, 72, 73, 78, 78, 82, 86, 85, 84, 85, 88, 88, 89]),
    "360 iterations, seed 0": (30, [50, 65, 73, 77, 82, 83, 82, 88, 92, 92, 90, 90, 90]),
    "360 iterations, seed 1": (30, [50, 69, 76, 80, 76, 81, 87, 85, 85, 85, 85, 88, 88]),
    "360 iterations, seed 2": (30, [50, 72, 74, 72, 78, 80, 80, 80, 78, 81, 85, 85, 85]),
    "720 iterations, seed 100": (60, [50, 75, 72, 79, 85, 80, 88, 85, 91, 90, 89, 90, 92]),
    "dense_grpo": (30, [50, 71, 72, 80, 80, 78]),
    "nft at 1e-3, collapses": (15, [52, 74, 74, 73, 1, 0]),
}
TARGETS = (75, 80, 85, 90)


def passed(iterations: list[int], scores: list[float], target: float) -> tuple[float, float]:
    """The span of iterations in which a curve passes a score; infinity where it is below it at the end."""
    first = next((i for i, score in enumerate(scores) if score >= target), None)
    if first is None:
        return math.inf, math.inf
    last_below = max(i for i, score in enumerate(scores) if score < target)
    settled = iterations[last_below + 1] if last_below + 1 < len(scores) else math.inf
    return iterations[first - 1], settled


def times() -> None:
    """Print the table of times to targets."""
    print("| curve | target | passed at | forecast | |")
    print("|---|---|---|---|---|")
    for name, (every, scores) in CURVES.items():
        iterations, half = [every * i for i in range(len(scores))], (len(scores) + 1) // 2
        curve = forecast(iterations[:half], scores[:half], most=100)
        for target in TARGETS:
            if curve is None or max(scores[:half]) >= target:
                continue
            low, high = passed(iterations, scores, target)
            reached = curve.reached(target)
            assert reached.low is not None and reached.high is not None
            if low == math.inf:
                hit = reached.high > iterations[-1]
                span = f"not by {iterations[-1]}"
            else:
                hit = reached.low <= high and reached.high >= low
                span = f"{low:g} to {high:g}" if high < math.inf else f"{low:g}, not to stay"
            said = [f"{reached.low:.0f}" if reached.low < math.inf else "never", "perhaps never"]
            if reached.high < math.inf:
                said[1] = f"{reached.high:.0f}"
            middle = f"{reached.mean:.0f}" if reached.mean < math.inf else "more likely never"
            print(f"| {name} | {target} | {span} | {middle}, {said[0]} to {said[1]} | {'hit' if hit else 'miss'} |")


def main() -> None:
    print("| curve | points | end | forecast | later points in their intervals |")
    print("|---|---|---|---|---|")
    for name, (every, scores) in CURVES.items():
        iterations, half = [every * i for i in range(len(scores))], (len(scores) + 1) // 2
        curve = forecast(iterations[:half], scores[:half], most=100)
        if curve is None:
            print(f"| {name} | {half} | {scores[-1]} | cannot tell | |")
            continue
        intervals = [curve.at(iteration) for iteration in iterations[half:]]
        held = [(one.low or 0) <= score <= (one.high or 0) for one, score in zip(intervals, scores[half:], strict=True)]
        end = intervals[-1]
        said = f"{end.mean:.0f}, {end.low:.0f} to {end.high:.0f}: {'hit' if held[-1] else 'miss'}"
        print(f"| {name} | {half} | {scores[-1]} | {said} | {sum(held)} of {len(held)} |")
    print()
    times()


if __name__ == "__main__":
    main()
