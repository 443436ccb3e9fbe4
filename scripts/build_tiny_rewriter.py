"""Make the tiny prompt rewriter that ships with flowalign, and the loose requests that it learns to rewrite.

    python scripts/build_tiny_rewriter.py        # a minute on a CPU

A loose request asks for what a prompt of `rewards.shapes` asks for, in words that the tiny generator never saw: other
names of colours, shapes and numbers, another order, no articles, a polite beginning. The script writes
`loose_train` and `loose_heldout` to flowalign/data/assets/prompts: {"prompt": "please 2 scarlet discs", "means": "two
red circles", "category": "counting"} a line. Requests that are held out in the shapes world are held out here too.

The rewriter, a Llama of half a million weights with a token a word, imitates a teacher that writes good English but
does not know the generator: it keeps each odd word with probability KEPT, and puts the generator's in its place
otherwise. That is the first stage of PromptEnhancer (arXiv 2509.04545). The second, the recipe tiny_lm/prompt_enhancer,
has to find out which words make the right picture. Model and tokenizer go to flowalign/data/assets/tiny_rewriter.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tiny_language import accuracy, language_model, teach
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rewards.shapes import Request, Thing, all_requests, heldout_requests, train_requests

ASSETS = Path(__file__).parents[1] / "flowalign" / "data" / "assets"
SPECIAL = ["<pad>", "<s>", "<rewrite>", "</s>"]
KEPT = 0.45
STEPS, BATCH, RATE = 500, 128, 1e-3
TAUGHT, TRAIN, HELDOUT = 2000, 600, 100  # for each category
CATEGORIES = ("single", "counting", "two_objects")  # of "position" the generator knows nothing

COLOURS = {
    "red": ("scarlet", "crimson", "ruby"),
    "orange": ("tangerine", "amber", "apricot"),
    "yellow": ("golden", "lemon", "mustard"),
    "green": ("emerald", "lime", "olive"),
    "blue": ("azure", "navy", "cobalt"),
    "purple": ("violet", "plum", "mauve"),
}
SHAPES = {
    "circle": (("disc", "discs"), ("ball", "balls"), ("dot", "dots")),
    "square": (("box", "boxes"), ("block", "blocks"), ("tile", "tiles")),
    "triangle": (("pyramid", "pyramids"), ("wedge", "wedges"), ("cone", "cones")),
}
NUMBERS = (("1", "a single"), ("2", "a pair of", "a couple of"), ("3", "a trio of"), ("4", "a quartet of"))
BEGINNINGS = ("", "", "please", "draw", "show me", "i want")
JOINTS = ("", "plus", "with", "next to", "beside", "and")

Row = tuple[str, str, str, str]
"""loose request, the prompt it means, what the teacher makes of it, its category"""


def either(one: str, other: str, random: random.Random) -> str:
    """What the teacher writes for an odd word: the word itself, or the generator's."""
    return one if random.random() < KEPT else other


def described(thing: Thing, number: int, random: random.Random) -> tuple[str, str]:
    """A thing in loose words without an article, the colour before or after; and in the teacher's."""
    plural = number > 1
    own = (thing.shape, f"{thing.shape}s")
    colour = random.choice((thing.colour, *COLOURS[thing.colour]))
    shape = random.choice((own, *SHAPES[thing.shape]))[plural]
    loose = random.choice((f"{colour} {shape}", f"{shape} {colour}", f"{shape} in {colour}"))
    return loose, f"{either(colour, thing.colour, random)} {either(shape, own[plural], random)}"


def with_article(thing: str) -> str:
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def loosely(request: Request, random: random.Random) -> Row:
    """A loose request that means this one."""
    number, first, last = len(request.things), request.things[0], request.things[-1]
    loose, taught = described(first, number if request.category == "counting" else 1, random)
    if request.category == "single":
        asked, taught = f"{random.choice(('', 'just'))} {loose}", with_article(taught)
    elif request.category == "counting":
        count = random.choice(NUMBERS[number - 1])
        asked = random.choice((f"{count} {loose}", f"{loose} {count.removesuffix(' of')}"))
        taught = f"{either(count, request.prompt.split()[0], random)} {taught}"
    else:
        other, also = described(last, 1, random)
        asked = f"{loose} {random.choice(JOINTS)} {other}"
        taught = f"{with_article(taught)} and {with_article(also)}"
    text = " ".join(f"{random.choice(BEGINNINGS)} {asked}".split())
    return text, request.prompt, taught, request.category


def draw(requests: Sequence[Request], count: int, random: random.Random, but: set[str]) -> list[Row]:
    """As many different loose requests of each category, none of them among `but`, to which they are added."""
    rows: list[Row] = []
    for category in CATEGORIES:
        pool = [request for request in requests if request.category == category]
        wanted = len(rows) + count
        while len(rows) < wanted:
            row = loosely(random.choice(pool), random)
            if row[0] not in but:
                but.add(row[0])
                rows.append(row)
    return rows


def parts(seed: int = 0) -> dict[str, list[Row]]:
    """The loose requests that are held out, those to be learned from by reinforcement, and those taught here."""
    own, seen = random.Random(seed), set[str]()
    heldout = draw(heldout_requests(), HELDOUT, own, seen)
    train = draw(train_requests(), TRAIN, own, seen)
    return {"heldout": heldout, "train": train, "taught": draw(train_requests(), TAUGHT, own, seen)}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word; a prompt of the model is <s> the loose request <rewrite>."""
    phrases = [*BEGINNINGS, *JOINTS, "in", "just", *(phrase for count in NUMBERS for phrase in count)]
    phrases += [word for words in COLOURS.values() for word in words]
    phrases += [word for pairs in SHAPES.values() for pair in pairs for word in pair]
    phrases += [request.prompt for request in all_requests() if request.category in CATEGORIES]
    words = dict.fromkeys(word for phrase in phrases for word in phrase.split())
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *words])}, unk_token="<pad>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A <rewrite>", special_tokens=[("<s>", 1), ("<rewrite>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"rewrite_token": "<rewrite>"},
        padding_side="left",
    )


def main() -> None:
    torch.manual_seed(0)
    lists, tokens = parts(), tokenizer()
    model = language_model(len(tokens), 48, tokens.eos_token_id)
    asked = [tokens(text).input_ids for text, *_ in lists["taught"]]
    answers = [
        [*tokens(taught, add_special_tokens=False).input_ids, tokens.eos_token_id]
        for _, _, taught, _ in lists["taught"]
    ]
    width = max(len(a) + len(b) for a, b in zip(asked, answers, strict=True))
    ids = torch.zeros(len(asked), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (question, answer) in enumerate(zip(asked, answers, strict=True)):
        both = len(question) + len(answer)
        ids[row, :both] = torch.tensor(question + answer)
        # the prompt and its end are learned, not the request
        labels[row, len(question) : both] = torch.tensor(answer)
    held, meant = [text for text, *_ in lists["heldout"]], [meant for _, meant, *_ in lists["heldout"]]
    measure = partial(accuracy, model, tokens, held, meant, 10)
    _, share = teach(model, ids, labels, STEPS, BATCH, RATE, measure, 1.0)
    folder = ASSETS / "tiny_rewriter"
    model.half().save_pretrained(folder)
    tokens.save_pretrained(folder)
    for name in ("train", "heldout"):
        lines = [json.dumps({"prompt": p, "means": m, "category": c}) for p, m, _, c in lists[name]]
        (ASSETS / "prompts" / f"loose_{name}.jsonl").write_text("\n".join(lines) + "\n")
    quality = {
        "parameters": model.num_parameters(),
        "in_the_generators_words": share,
        "taught": len(lists["taught"]),
    }
    (folder / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")


if __name__ == "__main__":
    main()
