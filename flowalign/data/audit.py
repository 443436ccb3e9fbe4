"""An audit of a list of prompts: duplicates, near duplicates, leakage, unsafe words, categories, lengths."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from flowalign.data.files import ASSETS
from flowalign.data.prompts import Prompts

UNSAFE_WORDS = ASSETS / "unsafe_words.txt"
"""The shipped list, a word or phrase a line; a start, not a filter to rely on."""
NEAR = 0.8
"""Similarity from which two prompts are near duplicates."""
GRAM = 8
"""Words in a row that count as a match in decontamination (Tulu 3)."""
SHARE = 0.5
"""Share of a benchmark's prompt above which a training prompt that has it is contaminated (Tulu 3)."""
CHUNK = 1000
"""Prompts that are compared with all others at once."""


@dataclass(frozen=True)
class SimilarPair:
    """Two prompts that are alike."""

    first: str
    second: str
    similarity: float
    """Share of the words of both that both have, in [0, 1]; 1: the same words, maybe in another order."""


@dataclass(frozen=True)
class Contamination:
    """A training prompt with a large part of a benchmark's prompt in it."""

    row: int
    """Number of the training prompt."""
    benchmark: int
    """Number of the benchmark's prompt."""
    share: float
    """Share of the benchmark's words that match, in (0, 1]."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the prompts in an encoder's tokens."""

    encoder: str
    limit: int
    """Tokens that the encoder reads, its special ones included; the rest of a prompt is cut off."""
    longest: int
    over: list[str]
    """Prompts over the limit."""


@dataclass(kw_only=True)
class Audit:
    """What an audit found; see `audit`."""

    prompts: int
    duplicates: list[tuple[str, int]]
    """Prompts that stand in the list more than once, and how often; case, spaces and punctuation do not count."""
    near: list[SimilarPair]
    """Near duplicates within the list, the nearest first."""
    leaked: list[SimilarPair] = field(default_factory=list)
    """Prompts of the list, each with the prompt of the other list that is the same or nearly so; the nearest
    first."""
    unsafe: list[tuple[str, str]]
    """Prompts with an unsafe word, and the word."""
    categories: dict[str, int]
    """Number of prompts of each category."""
    missing: list[str] = field(default_factory=list)
    """Categories of the other list that this one lacks."""
    lengths: list[Lengths] = field(default_factory=list)


def audit(
    prompts: Prompts,
    against: Prompts | None = None,
    unsafe_words: Sequence[str] = (),
    near: float = NEAR,
    by: str = "category",
    encoders: Mapping[str, tuple[Callable[[str], int], int]] | None = None,
) -> Audit:
    """Audit N prompts.

    Args:
        against: another list, such as a benchmark, of which this one should hold nothing.
        unsafe_words: words or phrases, found as whole words in any case.
        near: similarity of near duplicates, in (0, 1].
        by: key of the metadata that has the category.
        encoders: by name, a function that counts a prompt's tokens, and the encoder's limit.
    """
    plain = [normalised(text) for text in prompts.texts]
    first_of = dict(zip(reversed(plain), reversed(prompts.texts), strict=True))
    distinct = list(first_of)[::-1]
    result = Audit(
        prompts=len(prompts),
        duplicates=[(first_of[text], count) for text, count in Counter(plain).items() if count > 1],
        near=sorted(
            (
                SimilarPair(first_of[distinct[i]], first_of[distinct[j]], value)
                for i, j, value in similar(distinct, distinct, near)
                if i < j
            ),
            key=lambda pair: -pair.similarity,
        ),
        unsafe=[(text, word) for text in prompts.texts for word in unsafe_in(text, unsafe_words)],
        categories=_counts(prompts, by),
    )
    if against is not None:
        others = list(dict.fromkeys(map(normalised, against.texts)))
        originals = dict(zip(map(normalised, reversed(against.texts)), reversed(against.texts), strict=True))
        best: dict[int, tuple[int, float]] = {}
        for i, j, value in similar(distinct, others, near):
            # of several with the same words, the one in the same order
            if i not in best or (value, distinct[i] == others[j]) > (best[i][1], distinct[i] == others[best[i][0]]):
                best[i] = (j, value)
        leaked = [SimilarPair(first_of[distinct[i]], originals[others[j]], value) for i, (j, value) in best.items()]
        result.leaked = sorted(leaked, key=lambda pair: -pair.similarity)
        result.missing = [name for name in _counts(against, by) if name not in result.categories]
    for name, (count, limit) in (encoders or {}).items():
        sizes = [count(text) for text in prompts.texts]
        over = [text for text, size in zip(prompts.texts, sizes, strict=True) if size > limit]
        result.lengths.append(Lengths(name, limit, max(sizes), over))
    return result


def contaminated(
    prompts: Sequence[str], benchmark: Sequence[str], size: int = GRAM, share: float = SHARE
) -> list[Contamination]:
    """Prompts that have a large part of a benchmark's in them (Tulu 3, arXiv 2411.15124, sec. 3.2).

    A word of a benchmark's prompt matches where it stands in a run of `size` words that a training prompt has too. A
    training prompt is contaminated by each benchmark's prompt of whose words more than `share` match. Words are those
    of `normalised`, in the place of the paper's tokens; a benchmark's prompt of fewer words than `size` matches nothing
    (`audit` finds it).

    Returns:
        for each contaminated prompt the benchmark's prompt of which it has most, in the order of the prompts.
    """
    # the runs of the benchmark are fewer than those of the training set
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    lengths = []
    for number, text in enumerate(benchmark):
        words = normalised(text).split()
        lengths.append(len(words))
        for place, gram in enumerate(grams(words, size)):
            places[gram].append((number, place))
    found = []
    for row, text in enumerate(prompts):
        matched: dict[int, set[int]] = defaultdict(set)
        for gram in set(grams(normalised(text).split(), size)):
            for number, place in places.get(gram, ()):
                matched[number].update(range(place, place + size))
        shares = {number: len(words) / lengths[number] for number, words in matched.items()}
        worst = max(shares, key=lambda number: shares[number], default=None)
        if worst is not None and shares[worst] > share:
            found.append(Contamination(row, worst, shares[worst]))
    return found


def grams(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """The runs of `size` words, in order."""
    return [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]


def normalised(text: str) -> str:
    """A prompt's words in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def unsafe_in(text: str, words: Sequence[str]) -> list[str]:
    """The unsafe words or phrases that a prompt has as whole words."""
    padded = f" {normalised(text)} "
    return [word for word in words if f" {normalised(word)} " in padded]


def similar(one: Sequence[str], other: Sequence[str], least: float) -> list[tuple[int, int, float]]:
    """Rows of two lists of normalised prompts whose words are alike: Jaccard's index of their sets is at least this."""
    words = {word: i for i, word in enumerate(dict.fromkeys(w for text in (*one, *other) for w in text.split()))}
    first, second = _matrix(one, words), _matrix(other, words)
    sizes, other_sizes = (np.asarray(matrix.sum(axis=1)).ravel() for matrix in (first, second))
    pairs: list[tuple[int, int, float]] = []
    for start in range(0, len(one), CHUNK):
        shared = (first[start : start + CHUNK] @ second.T).tocoo()
        rows = shared.row + start
        index = shared.data / (sizes[rows] + other_sizes[shared.col] - shared.data)
        near = index >= least
        pairs += zip(rows[near].tolist(), shared.col[near].tolist(), index[near].tolist(), strict=True)
    return pairs


def _matrix(texts: Sequence[str], words: Mapping[str, int]) -> csr_matrix:
    """[texts, words] with 1 where a text has a word."""
    pairs = [(row, words[word]) for row, text in enumerate(texts) for word in dict.fromkeys(text.split())]
    rows, columns = zip(*pairs, strict=True) if pairs else ((), ())
    return csr_matrix((np.ones(len(pairs)), (rows, columns)), shape=(len(texts), len(words)))


def _counts(prompts: Prompts, by: str) -> dict[str, int]:
    return dict(Counter(str(record[by]) for record in prompts.metadata if by in record))


def token_counters(model: str) -> dict[str, tuple[Callable[[str], int], int]]:
    """The tokenizers of a pipeline (a folder, a hub name or a shipped model), for `audit`: no weights are read."""
    from diffusers import DiffusionPipeline
    from transformers import AutoTokenizer

    from flowalign.data.prompts import shipped

    path = shipped(model)
    config: dict[str, Any] = DiffusionPipeline.load_config(path)
    counters: dict[str, tuple[Callable[[str], int], int]] = {}
    for name, component in config.items():
        if name.startswith("tokenizer") and isinstance(component, list) and component[0] is not None:
            tokenizer = AutoTokenizer.from_pretrained(path, subfolder=name)
            counters[name] = (_counter(tokenizer), int(tokenizer.model_max_length))
    return counters


def _counter(tokenizer: Callable[..., Any]) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, verbose=False).input_ids)
