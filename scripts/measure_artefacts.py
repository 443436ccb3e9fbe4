"""False alarms and hits of the watch's signs (grids, saturation, sharpness, colours, layouts) on known pictures.

    python scripts/measure_artefacts.py                       # clean pictures, and grids drawn on them
    python scripts/measure_artefacts.py --runs runs/one ...   # pictures of runs before and after training

Clean pictures: drawings of the shapes world (32 px), and textures with the spectrum of photographs (256 px; amplitudes
fall as 1/f to 1/f^2). Grids of 8 and 16 px: lines, sines, and patches whose brightness is off. Of runs, every held-out
prompt has two pictures.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flowalign.app.loading import load_for_sampling
from flowalign.config import load
from flowalign.config.rewards import build_reward
from flowalign.data import Prompts
from flowalign.evaluation.scores import evaluate
from flowalign.evaluation.watch import Panel, record, signs
from rewards.rules import PERIODS, STATISTICS, image_statistics, thumbnail_distances
from rewards.shapes.draw import draw
from rewards.shapes.grammar import all_requests

Picture = NDArray[np.uint8]
AMPLITUDES = (1, 2, 4, 8, 16, 32)
"""Levels of 255."""
PLAIN = 0.7
"""A single picture with more is called gridded."""
SEEN = [f"statistics/{name}" for name in (*STATISTICS, "layout_distance")]


def textures(count: int, side: int, rng: np.random.Generator) -> list[Picture]:
    """Random textures, uint8 [side, side, 3], whose amplitudes fall with the frequency as those of photographs."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = 1
    pictures = []
    for _ in range(count):
        noise = rng.normal(size=(2, *frequency.shape))
        field = np.fft.irfft2((noise[0] + 1j * noise[1]) / frequency ** rng.uniform(1, 2), s=(side, side))
        levels = 127.5 + 50 * field[..., None] / field.std() + rng.normal(0, 20, 3)
        pictures.append(levels.clip(0, 255).round().astype(np.uint8))
    return pictures


def lines(shape: tuple[int, int], period: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """A brighter row and column in every period."""
    pattern = np.zeros(shape)
    pattern[::period] = pattern[:, ::period] = 1
    return pattern


def sines(shape: tuple[int, int], period: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """A product of sines."""
    y, x = np.indices(shape)
    return np.sin(2 * np.pi * x / period) * np.sin(2 * np.pi * y / period)


def patches(shape: tuple[int, int], period: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Patches that are brighter and darker by a standard deviation of 1."""
    return np.kron(rng.normal(size=(shape[0] // period, shape[1] // period)), np.ones((period, period)))


PATTERNS: tuple[Callable[[tuple[int, int], int, np.random.Generator], NDArray[np.float64]], ...] = (
    lines,
    sines,
    patches,
)


def statistics(pictures: list[Picture]) -> dict[str, NDArray[np.float64]]:
    """The statistics of N pictures of different prompts, [N] by the name of their part."""
    images = [Image.fromarray(picture) for picture in pictures]
    rows = [image_statistics(image) for image in images]
    columns = {f"statistics/{name}": np.array([row[name] for row in rows]) for name in rows[0]}
    distance = thumbnail_distances(images) + np.diag(np.full(len(images), np.inf))
    return columns | {"statistics/layout_distance": distance.min(axis=1)}


def verdict(before: dict[str, NDArray[np.float64]], after: dict[str, NDArray[np.float64]]) -> list[str]:
    """The watch's signs where an evaluation had these statistics before training and those after."""
    moments = (before, after)
    lists = [{name: values.tolist() for name, values in columns.items()} for columns in moments]
    return signs([record(i, [0.0] * len(next(iter(c.values()))), c) for i, c in enumerate(lists)])


def moved(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """How far a mean moved, in standard deviations of the pictures before."""
    return float((after.mean() - before.mean()) / before.std(ddof=1))


def drawn(columns: dict[str, NDArray[np.float64]], rows: NDArray[np.intp]) -> dict[str, NDArray[np.float64]]:
    """The statistics of some of the pictures."""
    return {name: values[rows] for name, values in columns.items()}


def measure(name: str, clean: list[Picture], size: int, trials: int, rng: np.random.Generator) -> None:
    """Print the false alarms of clean pictures, and for each grid the amplitudes and the shares that are seen."""
    columns = statistics(clean)
    grid = columns["statistics/grid"]
    alarms, moves = 0, dict.fromkeys(columns, 0.0)
    for order in (rng.permutation(len(clean)) for _ in range(trials)):
        before, after = drawn(columns, order[:size]), drawn(columns, order[size : 2 * size])
        alarms += bool(verdict(before, after))
        for statistic, farthest in moves.items():
            moves[statistic] = max(farthest, abs(moved(before[statistic], after[statistic])))
    farthest_of = ", ".join(f"{name.removeprefix('statistics/')} {move:.2f}" for name, move in moves.items())
    print(f"{name}: farthest moves in {trials} verdicts, in deviations of pictures: {farthest_of}")
    print(f"{name}: grid {grid.mean():.2f}, deviation {grid.std():.2f}, 99% below {np.quantile(grid, 0.99):.2f}")
    print(f"  false alarms: {(grid > PLAIN).sum()} of {len(clean)} pictures, {alarms} of {trials} verdicts on {size}")
    print(f"  {'seen of pictures / verdicts':<28}" + "".join(f"{amplitude:>12}" for amplitude in AMPLITUDES))
    before, changed = drawn(columns, np.arange(size)), clean[size : 2 * size]
    for period in PERIODS:
        for pattern in PATTERNS:
            cells = []
            for amplitude in AMPLITUDES:
                gridded = []
                for picture in changed:
                    added = picture + amplitude * pattern(picture.shape[:2], period, rng)[..., None]
                    gridded.append(added.clip(0, 255).round().astype(np.uint8))
                after = statistics(gridded)
                share = (after["statistics/grid"] > PLAIN).mean()
                told = any(sign.startswith("grid") for sign in verdict(before, after))
                cells.append(f"{share:.0%} {'yes' if told else 'no'}")
            print(f"  {f'{pattern.__name__}, {period} px':<28}" + "".join(f"{cell:>12}" for cell in cells))


def measure_run(run: Path) -> None:
    """Print the signs of a run's pictures, its held-out reward, and how the statistics moved by training."""
    config = load(run / "config.yaml")
    prompts, columns, rewards = Prompts.of(config.evaluation), [], []
    reward = build_reward(config.evaluation.rewards or config.rewards)
    for trained in (False, True):
        policy, sampling = load_for_sampling(str(run), None, config.model.dtype, trained)
        result = evaluate(policy, Panel(reward, []), prompts, sampling, 2, config.evaluation.seed)
        rewards.append(np.mean(result.value))
        columns.append({name: np.array(values) for name, values in result.parts.items() if name in SEEN})
    before, after = columns
    print(f"{run.name}, {2 * len(prompts)} pictures: held-out reward {rewards[0]:.3f} -> {rewards[1]:.3f}")
    for name in SEEN:
        means = f"{before[name].mean():.3f} -> {after[name].mean():.3f}"
        print(f"  {name.removeprefix('statistics/'):<16}{means}, {moved(before[name], after[name]):+.2f} deviations")
    print(f"  signs: {', '.join(verdict(before, after)) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=500, help="clean pictures of each kind")
    parser.add_argument("--size", type=int, default=80, help="pictures of an evaluation")
    parser.add_argument("--trials", type=int, default=500, help="verdicts on clean pictures")
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of runs, in the place of known pictures")
    options = parser.parse_args()
    for run in options.runs or ():
        measure_run(run)
    if options.runs:
        return
    rng = np.random.default_rng(0)
    requests = all_requests()
    shapes = [draw(requests[rng.integers(len(requests))], rng) for _ in range(options.pictures)]
    for name, clean in (("drawings, 32 px", shapes), ("textures, 256 px", textures(options.pictures, 256, rng))):
        measure(name, clean, options.size, options.trials, rng)


if __name__ == "__main__":
    main()
