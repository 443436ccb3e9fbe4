"""Run folders as the trainer writes them, with drawn pictures, for the gallery's tests and measurements.

python tests/flowalign/app/gallery/make_run.py FOLDER [--prompts 40] [--moments 4] [--side 32]
"""

import argparse
import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

from flowalign.app.gallery import Film, Group, save_previews, save_samples

COLOURS = ["red", "green", "blue", "orange", "purple", "teal"]
SHAPES = ["circle", "square", "triangle"]


def draw(prompt: str, quality: float, seed: int, side: int) -> Image.Image:
    """A shape in the prompt's colour, the cleaner the higher the quality."""
    words = prompt.split()
    colour = next((word for word in words if word in COLOURS), "gray")
    noise = random.Random(repr((prompt, seed)))
    picture = Image.new("RGB", (side, side), (235, 235, 230))
    pen = ImageDraw.Draw(picture)
    box = [side * f for f in (0.2, 0.2, 0.8, 0.8)]
    if "circle" in words:
        pen.ellipse(box, fill=colour)
    elif "triangle" in words:
        pen.polygon([(side * 0.5, box[1]), (box[0], box[3]), (box[2], box[3])], fill=colour)
    else:
        pen.rectangle(box, fill=colour)
    spot = max(1, side // 16)
    for _ in range(round((1 - quality) * 60)):
        x, y, *colour = noise.randbytes(5)
        x, y = x * side // 256, y * side // 256
        pen.rectangle([x, y, x + spot, y + spot], fill=tuple(colour))
    return picture


def add_moment(run: Path, iteration: int, prompts: list[str], quality: float, side: int = 32) -> None:
    """samples/iteration-XXXXXX with a picture a prompt."""
    samples = []
    for i, prompt in enumerate(prompts):
        good = min(1.0, max(0.0, quality + random.Random(f"{iteration} {i}").uniform(-0.3, 0.3)))
        record = {"prompt": prompt, "seed": 1_000_000 + i, "metadata": {"category": "single" if i % 2 else "counting"}}
        scores = {"reward": good, "soft": good, "strict": float(good > 0.6)}
        samples.append((draw(prompt, good, i, side), record | scores))
    save_samples(run, iteration, samples)


def add_previews(run: Path, iteration: int, side: int = 32) -> None:
    """Two films of 6 steps and two groups of 6."""
    films, groups = [], []
    for n, prompt in enumerate(["a red circle", "a blue square"]):
        rewards = [0.1, 0.15, 0.4, 0.35, 0.7, 0.8, 0.85]
        films.append(
            Film(
                prompt=prompt,
                seed=n,
                pictures=[draw(prompt, r, n, side) for r in rewards],
                rewards=rewards,
                advantages=[-0.3, 0.8, -0.9, 1.2, 0.1, 0.0],
                sparse=None if n else 0.6,
                ratios=None if n else [math.nan, 1.01, 0.99, 1.02, math.nan, math.nan],
                noise=[0, 0.4, 0.3, 0.2, 0, 0],
                stochastic=[False, True, True, True, False, False],
                turning=[False, False, True, False, False, False],
                sigmas=[1, 0.83, 0.67, 0.5, 0.33, 0.17, 0],
            )
        )
        marks = [0.2, 0.9, 0.5, 0.5, 0.7, 0.1]
        mean, spread = 0.4833, 0.28
        groups.append(
            Group(
                prompt=prompt,
                seeds=list(range(6)),
                samples=[draw(prompt, m, i, side) for i, m in enumerate(marks)],
                rewards=marks,
                advantages=[(m - mean) / spread for m in marks],
                parts={"soft": marks},
                wins=[[0.5 + 0.5 * ((a > b) - (a < b)) for b in marks] for a in marks],
            )
        )
    save_previews(run, iteration, films, groups)


def make_run(
    run: Path, prompts: int = 40, moments: int = 4, side: int = 32, name_prompts: list[str] | None = None
) -> Path:
    """A run of `moments` evaluations, 10 iterations apart, getting better until a warned-of fall of the panel."""
    texts = list(name_prompts or [])
    texts += [
        f"{'an' if i % 6 == 3 else 'a'} {COLOURS[i % 6]} {SHAPES[i // 6 % 3]} number {i}"
        for i in range(prompts - len(texts))
    ]
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("name: made\n")
    for moment in range(moments):
        add_moment(run, 10 * moment, texts, 0.3 + 0.5 * moment / max(moments - 1, 1), side)
    with open(run / "metrics.jsonl", "w") as lines:
        for i in range(10 * (moments - 1)):
            lines.write(
                json.dumps(
                    {
                        "iteration": i,
                        "reward/mean": 0.3 + 0.015 * i,
                        "reward/std": 0.2,
                        "policy/kl": 0.001 * i,
                        "policy/clip_fraction": 0.1 + 0.002 * (i % 7),
                        "policy/ratio": 1.0,
                        "policy/gradient_norm": 0.4,
                        "diversity/pixels": 0.5 - 0.004 * i,
                        "seconds/rollout": 1.0,
                    }
                    | {f"dense/persistence/{k}": value for k, value in enumerate([0.2, 0.4, 0.7, 0.8, 0.9, 1.0], 1)}
                )
                + "\n"
            )
    with open(run / "evaluations.jsonl", "w") as lines:
        for moment in range(moments):
            record = {"iteration": 10 * moment, "all/reward": 0.3 + 0.1 * moment, "all/strict": 0.2 + 0.1 * moment}
            record |= {"all/samples": prompts, "panel/aesthetic": 0.6 - 0.02 * moment**2}
            if moment == 2:
                text = "the trained reward rises while panel/aesthetic falls"
                record |= {"watch": {"iteration": 20}, "verdict": "suspect", "warnings": [text]}
            lines.write(json.dumps(record) + "\n")
    add_previews(run, 10 * (moments - 1), side)
    return run


def make_search(folder: Path, prompts: list[str], side: int = 32) -> Path:
    """A search's folder: 6 plain samples of each prompt, and 6 begun, of which 3 go on and 2 of those are best."""
    from flowalign.search.found import Node, SearchResult
    from flowalign.search.store import SearchStore

    store = SearchStore(folder)
    store.open({"reward": "made"})
    for number, prompt in enumerate(prompts):
        for method, parents in (("best_of_n", []), ("ttsnap", [0, 2, 5])):
            found = SearchResult(prompt=prompt, method=method, steps=4, small={}, reward_calls=6 + len(parents))
            marks = random.Random(f"{number} {method}")
            for n in range(6):
                score, kept = marks.random(), not parents or n in parents
                node = Node(
                    parent=None,
                    step=2 if parents else 4,
                    score=score,
                    forwards=12 if parents else 12 * (1 + n // 3),
                    kept=kept,
                )
                found.add(node, draw(prompt, score, n, side))
            for parent in parents:
                score = 0.5 + marks.random() / 2
                found.add(Node(parent=parent, step=4, score=score, forwards=18), draw(prompt, score, parent, side))
            found.forwards = found.nodes[-1].forwards
            store.add(number, found)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name, default in (("prompts", 40), ("moments", 4), ("side", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = vars(parser.parse_args())
    print(make_run(arguments.pop("folder"), **arguments))
