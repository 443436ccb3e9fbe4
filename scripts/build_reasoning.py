"""Demonstrations of a judge that thinks: two drawn pictures are described, then the better one is named.

    python scripts/build_reasoning.py --out runs/reasoning [--pairs 3000] [--listener]

For `flowalign cold-start` on the tiny VLM. A picture shows what was asked for, or something that differs in colour,
shape or number; what it shows is the renderer's truth, and the better one is the checker's choice. Every pair is asked
about in both orders. With --listener the description is given and the answer alone is taught.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from flowalign.runs.files import write_atomically
from rewards.judges import load_template
from rewards.shapes import Request, Thing, check, draw, train_requests
from rewards.shapes.grammar import COLOURS, SHAPES

LARGEST = 4  # objects in a picture


def build(out: Path, pairs: int, seed: int = 0, listener: bool = False) -> Path:
    """Draw the pairs; returns the file of questions with demonstrations."""
    rng = np.random.default_rng(seed)
    asked = load_template("shapes_listener" if listener else "shapes_think")
    requests = [request for request in train_requests() if request.category == "counting"]
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    while len(lines) < 2 * pairs:
        wanted = requests[rng.integers(len(requests))]
        shown = [changed(wanted, rng) for _ in range(2)]
        pictures = [Image.fromarray(draw(request, rng)) for request in shown]
        score = [check(picture, wanted.prompt).soft for picture in pictures]
        if score[0] == score[1]:
            continue
        number = len(lines) // 2
        files = [f"pictures/{number:06d}-{i}.png" for i in range(2)]
        for picture, file in zip(pictures, files, strict=True):
            picture.save(out / file)
        for order in ([0, 1], [1, 0]):
            thought = ", ".join(shown[i].prompt for i in order)
            answer = str(1 + (score[order[1]] > score[order[0]]))
            question = asked.text(asked.questions[0], wanted.prompt, {"text": thought})
            record = {"prompt": question, "image": [files[i] for i in order], "answer": answer, "pair": number}
            lines.append(json.dumps(record | {"demonstration": answer if listener else f"{thought}: {answer}"}) + "\n")
    write_atomically(out / "questions.jsonl", "".join(lines))
    return out / "questions.jsonl"


def changed(wanted: Request, rng: np.random.Generator) -> Request:
    """What was asked for with its colour, shape and number kept or drawn anew, each half of the time."""
    one, number = wanted.things[0], len(wanted.things)
    keep = rng.random(3) < 0.5
    colour = one.colour if keep[0] else str(rng.choice(COLOURS))
    shape = one.shape if keep[1] else str(rng.choice(SHAPES))
    return Request("counting", (Thing(colour, shape),) * (number if keep[2] else int(rng.integers(1, LARGEST + 1))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/reasoning"))
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--listener", action="store_true", help="teach to answer after another's description")
    arguments = parser.parse_args()
    print(build(arguments.out, arguments.pairs, arguments.seed, arguments.listener))
