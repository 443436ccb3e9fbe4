"""Real pictures to learn from: drawings of the shapes world that meet their prompts.

    python scripts/draw_targets.py configs/tiny_sd3/flow_grpo.yaml --count 2000 --output runs/drawn [KEY=VALUE ...]

The configuration says which prompts. Writes OUTPUT/targets.jsonl, for `sft`, `soar` and the others that learn from
pictures, and the pictures beside it. The tiny Stable Diffusion 3 learned from such drawings.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from flowalign.config import load
from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from flowalign.runs.files import write_atomically
from rewards.shapes.draw import draw
from rewards.shapes.grammar import parse


def draw_targets(prompts: Prompts, count: int, output: Path, seed: int = 0) -> Path:
    """Draw this many pictures, the prompts in turn; returns the file of targets."""
    (output / "pictures").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    lines = []
    for number, row in enumerate(shuffled(len(prompts), 0, count, seed)):
        file = f"pictures/{number:06d}.png"
        Image.fromarray(draw(parse(prompts.texts[row]), rng)).save(output / file)
        lines.append(json.dumps({"prompt": prompts.texts[row], "target": file}) + "\n")
    write_atomically(output / "targets.jsonl", "".join(lines))
    return output / "targets.jsonl"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("runs/drawn"))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and the drawings")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    config = load(arguments.config, arguments.overrides)
    print(draw_targets(Prompts.of(config.data), arguments.count, arguments.output, arguments.seed))
