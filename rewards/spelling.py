"""The spelling world: words drawn in a letter of 5 x 7 pixels, and a reader that finds the letters again by their form.

A prompt quotes one word ('a sign that says "bat"'), of consonants and vowels in turn. Nothing is counted, coloured or
placed: what a picture is worth is how much of the word can be read, as OCR rewards say it.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from torch import Tensor

from rewards.base import Metadata, Scores, Spec
from rewards.rules import similarity, wanted_text

SIZE = 32
PAPER, INK = 240.0, 40.0
HEIGHT, WIDTH, GAP = 7, 5, 2
LETTERS = {
    "a": ".###. #...# #...# ##### #...# #...# #...#",
    "b": "####. #...# #...# ####. #...# #...# ####.",
    "d": "###.. #..#. #...# #...# #...# #..#. ###..",
    "e": "##### #.... #.... ####. #.... #.... #####",
    "f": "##### #.... #.... ####. #.... #.... #....",
    "g": ".###. #...# #.... #.### #...# #...# .###.",
    "i": "##### ..#.. ..#.. ..#.. ..#.. ..#.. #####",
    "k": "#...# #..#. #.#.. ##... #.#.. #..#. #...#",
    "l": "#.... #.... #.... #.... #.... #.... #####",
    "m": "#...# ##.## #.#.# #.#.# #...# #...# #...#",
    "n": "#...# ##..# ##..# #.#.# #..## #..## #...#",
    "o": ".###. #...# #...# #...# #...# #...# .###.",
    "p": "####. #...# #...# ####. #.... #.... #....",
    "r": "####. #...# #...# ####. #.#.. #..#. #...#",
    "s": ".#### #.... #.... .###. ....# ....# ####.",
    "t": "##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..",
    "u": "#...# #...# #...# #...# #...# #...# .###.",
    "v": "#...# #...# #...# #...# .#.#. .#.#. ..#..",
    "z": "##### ....# ...#. ..#.. .#... #.... #####",
}
VOWELS = "aeiou"
ALIKE = 0.7  # the correlation with a letter's form from which on it is one
STRONG = 0.5  # its contrast, as a share of a drawn letter's
LEVEL = 2  # pixels that a line's letters may go up and down
APART = 6  # pixels between two letters, from which on there is a space
FAINT = 0.25  # less ink than this is paper
STRAY = 0.2  # of the ink may be outside the letters


@cache
def words() -> tuple[str, ...]:
    """All words of the world: consonant, vowel, consonant, and some end in a vowel; 5,880."""
    consonants = [letter for letter in LETTERS if letter not in VOWELS]
    short = ["".join(letters) for letters in product(consonants, VOWELS, consonants)]
    return (*short, *(word + vowel for word, vowel in product(short, VOWELS)))


def prompt_of(word: str) -> str:
    return f'a sign that says "{word}"'


@cache
def _forms() -> Tensor:
    """Each letter with a pixel of paper around it, 1 for ink [letters, 9, 7]."""
    drawn = [[[float(pixel == "#") for pixel in row] for row in form.split()] for form in LETTERS.values()]
    return F.pad(torch.tensor(drawn), (1, 1, 1, 1))


def draw(word: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A picture of a word of at most four letters, uint8 [32, 32, 3]; its place and tones vary with `rng`."""
    coverage = np.zeros((SIZE, SIZE))
    top = rng.integers(1, SIZE - HEIGHT)
    left = rng.integers(1, SIZE - len(word) * (WIDTH + GAP) + GAP)
    for i, letter in enumerate(word):
        form = _forms()[list(LETTERS).index(letter), 1:-1, 1:-1].numpy()
        at = left + i * (WIDTH + GAP)
        coverage[top : top + HEIGHT, at : at + WIDTH] = form
    paper, ink = PAPER + rng.integers(-6, 7), INK + rng.integers(-20, 21)
    grey = paper + coverage * (ink - paper)
    return np.repeat(grey.round().astype(np.uint8)[..., None], 3, axis=-1)


def read(images: Sequence[Image]) -> tuple[list[str], list[float]]:
    """Text on the line of each picture's clearest letter, and the share of its ink that is in no letter read.

    A letter's form is correlated with every place; the best places that do not overlap are letters.
    """
    ink = torch.stack([_ink(image) for image in images])
    forms = _forms()
    padded = F.pad(ink, (1, 1, 1, 1))[:, None]
    centred = forms - forms.mean(dim=(1, 2), keepdim=True)
    lengths = centred.flatten(1).norm(dim=1)[None, :, None, None]
    along = F.conv2d(padded, centred[:, None])  # [pictures, letters, 26, 28], by the letter's upper left corner
    size = forms[0].numel()
    mean, square = (F.avg_pool2d(x, forms.shape[1:], stride=1) for x in (padded, padded**2))
    spread = (size * (square - mean**2)).clamp(min=1e-6).sqrt()
    likeness = (along / lengths / spread).where(along / lengths**2 >= STRONG, 0)
    lines = [_line(*both) for both in zip(likeness, ink, strict=True)]
    return [text for text, _ in lines], [stray for _, stray in lines]


def _ink(image: Image) -> Tensor:
    """Share of ink in each pixel [32, 32]."""
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Resampling.BOX)
    grey = torch.from_numpy(np.asarray(image.convert("L"), dtype=np.float32).copy())
    ink = ((PAPER - grey) / (PAPER - INK)).clamp(0, 1)
    return ink.where(ink >= FAINT, 0)


def _line(likeness: Tensor, ink: Tensor) -> tuple[str, float]:
    """The text of the line, and the share of the ink [32, 32] that is in no letter of it."""
    best, letter = likeness.max(dim=0)
    letters: list[tuple[int, int, str]] = []
    while best.max() >= ALIKE:
        y, x = divmod(int(best.argmax()), best.shape[1])
        best[max(0, y - HEIGHT) : y + HEIGHT + 1, max(0, x - WIDTH) : x + WIDTH + 1] = 0
        if not letters or abs(y - letters[0][0]) <= LEVEL:
            letters.append((y, x, list(LETTERS)[int(letter[y, x])]))
    rest, text, end = ink.clone(), "", None
    for y, x, name in sorted(letters, key=lambda place: place[1]):
        rest[max(0, y - 1) : y + HEIGHT + 1, max(0, x - 1) : x + WIDTH + 1] = 0
        text += " " + name if end is not None and x - end >= APART else name
        end = x + WIDTH
    return text, float(rest.sum() / ink.sum().clamp(min=1))


class SpellingReward:
    """Rule-based: can the word that the prompt quotes be read, and nothing else; in [0, 1].

    Parts: soft (1 - normalised edit distance), strict (the word to the letter, and next to no ink beside it).

    Args:
        strict_weight: weight of `strict`; the rest goes to `soft`.
    """

    name = "spelling"
    spec = Spec(frozenset({"image", "prompt", "metadata"}))

    def __init__(self, strict_weight: float = 0.5) -> None:
        self.strict_weight = strict_weight

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        texts, stray = read(samples)
        wanted = [wanted_text(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        soft = torch.tensor([similarity(text, word) for text, word in zip(texts, wanted, strict=True)])
        right = [text == word and beside <= STRAY for text, word, beside in zip(texts, wanted, stray, strict=True)]
        strict = torch.tensor(right, dtype=torch.float32)
        value = self.strict_weight * strict + (1 - self.strict_weight) * soft
        return Scores(value, {"soft": soft, "strict": strict})
