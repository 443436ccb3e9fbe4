"""Write the shipped lists of everyday-object prompts in the manner of GenEval (arXiv 2310.11513), seeded.

    python scripts/build_object_prompts.py

writes flowalign/data/assets/prompts/objects_train.jsonl and objects_heldout.jsonl: one object, two objects, counting,
colours, position and colour attribution, each line with the category and what the picture must hold.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

OBJECTS = """
apple backpack banana bear bed bench bicycle bird boat book bottle bowl bus cake car carrot cat chair clock couch
cow cup dog donut elephant fork giraffe handbag horse keyboard kite knife lamp laptop motorcycle orange oven pizza
refrigerator sandwich scissors sheep sink skateboard spoon suitcase table teddy_bear toaster toothbrush train truck
umbrella vase zebra
""".split()
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
NUMBERS = ("two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
IRREGULAR = {"knife": "knives", "sheep": "sheep", "scissors": "scissors", "bus": "buses", "bench": "benches"}
IRREGULAR |= {"couch": "couches", "sandwich": "sandwiches", "toothbrush": "toothbrushes", "teddy_bear": "teddy bears"}


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    return IRREGULAR.get(name, f"{name.replace('_', ' ')}s")


def draw(category: str, rng: np.random.Generator) -> dict[str, Any]:
    """One prompt of a category and what it asks for."""
    first, second = (str(name) for name in rng.choice(OBJECTS, 2, replace=False))
    a, b = first.replace("_", " "), second.replace("_", " ")
    one, other = (str(colour) for colour in rng.choice(COLOURS, 2, replace=False))
    match category:
        case "single":
            text, include = article(a), [{"class": a, "count": 1}]
        case "two_objects":
            text, include = f"{article(a)} and {article(b)}", [{"class": a, "count": 1}, {"class": b, "count": 1}]
        case "counting":
            number = int(rng.integers(len(NUMBERS)))
            text, include = f"{NUMBERS[number]} {plural(first)}", [{"class": a, "count": number + 2}]
        case "colours":
            text, include = article(f"{one} {a}"), [{"class": a, "count": 1, "color": one}]
        case "position":
            relation = str(rng.choice(RELATIONS))
            text = f"{article(a)} {relation} {article(b)}"
            include = [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}]
        case _:
            text = f"{article(f'{one} {a}')} and {article(f'{other} {b}')}"
            include = [{"class": a, "count": 1, "color": one}, {"class": b, "count": 1, "color": other}]
    return {"prompt": f"a photo of {text}", "category": category, "include": include}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("flowalign/data/assets/prompts"))
    parser.add_argument("--train", type=int, default=1200, help="prompts to train on")
    parser.add_argument("--heldout", type=int, default=120, help="prompts never trained on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    categories = ("single", "two_objects", "counting", "colours", "position", "attribution")
    prompts: dict[str, dict[str, Any]] = {}
    while len(prompts) < options.train + options.heldout:
        made = draw(str(rng.choice(categories)), rng)
        prompts.setdefault(made["prompt"], made)
    order = list(prompts.values())
    picks = set(rng.permutation(len(order))[: options.heldout].tolist())
    for name, keep in (("objects_train", False), ("objects_heldout", True)):
        lines = [json.dumps(p) for i, p in enumerate(order) if (i in picks) == keep]
        (options.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
