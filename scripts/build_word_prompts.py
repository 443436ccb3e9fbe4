"""Write the shipped lists of prompts that ask for words in the picture, as for Flow-GRPO's OCR task, seeded.

    python scripts/build_word_prompts.py

writes flowalign/data/assets/prompts/words_train.jsonl and words_heldout.jsonl: a place for writing, and what is to be
written on it, in quotes and under 'text'. No text is in both lists.
"""

import json
from pathlib import Path

import numpy as np

PLACES = (
    """
a shop sign|a street sign|a road sign at night|a neon sign in a window|a chalkboard in a cafe|a wooden board on a beach
a poster on a brick wall|a book cover on a table|a newspaper on a bench|a birthday cake|a coffee mug|a T-shirt
a banner over a street|a billboard at sunset|a whiteboard in a classroom|a sticker on a laptop|a label on a glass bottle
a name tag on a jacket|a ticket on a desk|a postcard|a stamp|a doormat|a balloon|a licence plate|a cinema screen
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
FIRST = """
open closed free fresh warm quiet grand little lucky golden silver happy early late local north south royal simple
bright gentle clever hidden final second public
""".split()
SECOND = """
today garden market coffee bread books music dreams harbour station summer winter morning evening lesson party window
river mountain circus library theatre bicycle lantern journey
""".split()
COUNTS = {"train": 1000, "heldout": 100}


def main() -> None:
    rng = np.random.default_rng(0)
    texts = [f"{a} {b}".title() for a in FIRST for b in SECOND]
    rng.shuffle(texts)
    shares = {"heldout": texts[: len(texts) // 10], "train": texts[len(texts) // 10 :]}
    for name, count in COUNTS.items():
        pairs = [(place, text) for place in PLACES for text in shares[name]]
        lines = []
        for i in rng.choice(len(pairs), count, replace=False):
            place, text = pairs[i]
            line = {"prompt": f'{place} that says "{text}"', "category": "words", "text": text}
            lines.append(json.dumps(line) + "\n")
        path = Path(__file__).parent.parent / "flowalign" / "data" / "assets" / "prompts" / f"words_{name}.jsonl"
        path.write_text("".join(lines))


if __name__ == "__main__":
    main()
