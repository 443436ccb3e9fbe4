"""Prompts in the manner of GenEval (arXiv 2310.11513), with the metadata that its evaluator reads.

The six tasks, classes, colours, relations and fields are as in prompts/create_prompts.py of
github.com/djghosh13/geneval. The split is Flow-GRPO's (arXiv 2505.05470, section 5.1): prompts that ask for the same
thing in another order count as one. Plurals are English ones, where the published prompts have "benchs".
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

from flowalign.errors import ConfigError

CLASSES = tuple(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
    parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
    handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
    surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
    broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    computer mouse, tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book,
    clock, vase, scissors, teddy bear, hair drier, toothbrush""".replace("\n    ", " ").split(", ")
)
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
NUMBERS = {2: "two", 3: "three", 4: "four"}
OPPOSITE = {"left of": "right of", "above": "below"}
PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "broccoli": "broccoli"}
PLURALS |= {"skis": "skis", "scissors": "scissors", "computer mouse": "computer mice"}

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
Content = tuple[Any, ...]
"""The content of a prompt, the same in whichever order the prompt says it."""


def generate(
    count: int, heldout: int, seed: int, shares: Mapping[str, float] | None = None, avoid: Iterable[Content] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts to train on and prompts to measure on, which ask for different things.

    Args:
        count, heldout: how many of each.
        shares: share of each task, default equal. A task whose prompts run out starts over, so that its share holds;
            held out it gives half of its prompts at most.
        avoid: contents that no prompt may have, as of `content_of`.

    Returns:
        records with 'prompt', 'tag', 'include' and, for counting, 'exclude'; 'category' repeats the tag.

    Raises:
        ConfigError: a task of which everything is to be avoided.
    """
    weights = dict.fromkeys(TASKS, 1.0) if shares is None else shares
    rng, avoided = np.random.default_rng(seed), set(avoid)
    train, test = [], []
    numbers = [_split(count, weights), _split(heldout, weights)]
    for task in TASKS:
        choices = [choice for choice in possible(task) if (task, *choice) not in avoided]
        if not choices and weights.get(task, 0) > 0:
            raise ConfigError(f"every prompt of the task '{task}' is to be avoided")
        order = rng.permutation(len(choices))
        first = min(numbers[1][task], len(choices) // 2)
        test += [_record(task, choices[i], rng) for i in order[:first]]
        train += [_record(task, choices[i], rng) for i in np.resize(order[first:], numbers[0][task])]
    return [train[i] for i in rng.permutation(len(train))], [test[i] for i in rng.permutation(len(test))]


def possible(task: str) -> list[Content]:
    """Everything a prompt of a task can ask for. People get no colour, as in GenEval."""
    coloured = sorted(set(CLASSES) - {"person"})
    match task:
        case "single_object":
            return [(name,) for name in CLASSES]
        case "two_object":
            return list(combinations(sorted(CLASSES), 2))
        case "counting":
            return list(product(CLASSES, NUMBERS))
        case "colors":
            return list(product(coloured, COLOURS))
        case "position":
            return [(a, relation, b) for a, b in permutations(CLASSES, 2) for relation in OPPOSITE]
        case _:
            pairs = product(combinations(coloured, 2), permutations(COLOURS, 2))
            return [((a, one), (b, other)) for (a, b), (one, other) in pairs]


def content_of(record: Mapping[str, Any]) -> Content:
    """Content of a GenEval record: its task, and the same for "a left of b" and "b right of a"."""
    include = record["include"]
    match record["tag"]:
        case "counting":
            return "counting", include[0]["class"], include[0]["count"]
        case "colors":
            return "colors", include[0]["class"], include[0]["color"]
        case "position":
            other, one = (item["class"] for item in include)
            relation = include[1]["position"][0]
            if relation in OPPOSITE:
                return "position", one, relation, other
            return "position", other, {after: before for before, after in OPPOSITE.items()}[relation], one
        case "color_attr":
            return "color_attr", *sorted((item["class"], item["color"]) for item in include)
        case tag:
            return tag, *sorted(item["class"] for item in include)


def _record(task: str, choice: Content, rng: np.random.Generator) -> dict[str, Any]:
    """One wording of what is asked for, with GenEval's fields."""
    swap = bool(rng.integers(2))
    words = list(reversed(choice)) if swap and task in ("two_object", "color_attr") else list(choice)
    exclude = []
    match task:
        case "single_object" | "two_object":
            text, include = " and ".join(map(_article, words)), [{"class": name, "count": 1} for name in words]
        case "counting":
            name, number = words
            text, include = f"{NUMBERS[number]} {_plural(name)}", [{"class": name, "count": number}]
            exclude = [{"class": name, "count": number + 1}]
        case "position":
            one, relation, other = words
            if swap:
                one, relation, other = other, OPPOSITE[relation], one
            text = f"{_article(one)} {relation} {_article(other)}"
            include = [{"class": other, "count": 1}, {"class": one, "count": 1, "position": [relation, 0]}]
        case _:
            pairs = [words] if task == "colors" else words
            text = " and ".join(_article(f"{colour} {name}") for name, colour in pairs)
            include = [{"class": name, "count": 1, "color": colour} for name, colour in pairs]
    record = {"prompt": f"a photo of {text}", "tag": task, "category": task, "include": include}
    return record | ({"exclude": exclude} if exclude else {})


def _split(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers that sum to count, as near to the weights as can be."""
    edges = np.cumsum([weights.get(task, 0) for task in TASKS])
    return dict(zip(TASKS, np.diff(np.round(count * edges / edges[-1]), prepend=0).astype(int).tolist(), strict=True))


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _plural(name: str) -> str:
    return PLURALS.get(name) or name + ("es" if name.endswith(("s", "ch", "sh")) else "s")


def parse_shares(text: str) -> dict[str, float]:
    """Shares of the six tasks from a text such as "0:1:5:1:7:3", in the order of `TASKS`."""
    try:
        values: Sequence[float] = [float(share) for share in text.split(":")]
    except ValueError:
        values = []
    if len(values) != len(TASKS) or min(values) < 0 or not sum(values) > 0:
        raise ConfigError(f"'{text}' is not six shares, not all 0, of {', '.join(TASKS)}; 0:1:5:1:7:3 works")
    return dict(zip(TASKS, values, strict=True))
