"""Polls on a gallery: which pair of samples a rater is asked about next, and what the votes say."""

import hashlib
import io
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowalign.app.gallery.build import SOUNDS, Gallery, Placed
from flowalign.app.gallery.votes import commands, enough, results
from flowalign.data.votes import CATCH, REPEAT, WORTH, Pair, Votes, plain, plain_of
from flowalign.evaluation.voting import BradleyTerry

EVERY = 10
"""Every tenth pair comes again, for the rater's own agreement; another one has a broken sample; another one is one that
others have judged."""
FIRST_CATCH = 7
"""Pairs that a rater has judged before the first one with a broken sample."""
WORDS = 6
"""Fewest different words of a text that can be broken by their order."""
BLOCKS = 64
"""Colours of a broken picture in each direction."""
LOOKED_AT = 300
"""Pairs among which the next one is chosen, and newest votes that choose it."""


class Refused(Exception):
    """A request for something that is not there; the person gets the text."""


class Polls:
    """The votes on a gallery: the pairs of two columns, and the raters' verdicts on them.

    Args:
        folder: the gallery's folder, with the file of votes.
    """

    def __init__(self, gallery: Gallery, folder: Path) -> None:
        self.gallery, self.folder, self.votes = gallery, folder, Votes(folder / "votes.sqlite")
        self.at: dict[tuple[int, int], Placed] = {(p.row, p.column): p for p in gallery.placed}
        self.pairs: dict[tuple[int, int], dict[str, tuple[Placed, Placed]]] = {}

    def contest(self, a: object, b: object) -> dict[str, tuple[Placed, Placed]]:
        """Pairs {key: (sample of column a, sample of column b)}; raises Refused for columns that are not there.

        A pair is two pictures, or two different texts, of one prompt and seed; if both columns are the same, any two
        samples of one prompt.
        """
        columns = range(len(self.gallery.columns))
        if type(a) is not int or type(b) is not int or a not in columns or b not in columns:
            raise Refused("choose a moment for either side")
        if (a, b) not in self.pairs:
            both = self._of_one_prompt(a) if a == b else self._of_one_row(a, b)
            self.pairs[a, b] = {_key(x, y): (x, y) for x, y in both if _differ(x, y)}
        return self.pairs[a, b]

    def _of_one_row(self, a: int, b: int) -> list[tuple[Placed, Placed]]:
        sides = [(self.at.get((row, a)), self.at.get((row, b))) for row in range(len(self.gallery.rows))]
        return [(x, y) for x, y in sides if x is not None and y is not None]

    def _of_one_prompt(self, column: int) -> list[tuple[Placed, Placed]]:
        by_prompt: dict[str, list[Placed]] = {}
        for placed in self.gallery.placed:
            if placed.column == column:
                by_prompt.setdefault(placed.sample.prompt, []).append(placed)
        return [pair for samples in by_prompt.values() for pair in itertools.combinations(samples, 2)]

    def next(self, rater: str, a: object, b: object) -> dict[str, Any]:
        """The next pair for the rater.

        Between two moments it is the next one in the rater's own random order, since a win rate is of random pairs.
        Within one moment, whose votes are for training, it is the one that all votes so far leave most open. Now and
        then a pair comes again, with its sides swapped, or one of its samples beside a broken one.
        """
        contest = self.contest(a, b)
        verdicts = self.votes.verdicts(contest)
        given = verdicts.get(rater, {})
        done = [key for key in given if plain(key)]
        left = sorted(contest.keys() - set(done), key=lambda k: _draw(rater, k, "order"))
        progress = {"done": len(done), "total": len(contest)}
        if not left:
            return {**progress, "pair": None}
        key = self._check(rater, contest, given, done)
        if key is None:
            key = self._most_open(contest, verdicts, done, left) if a == b else left[0]
        token = _token(rater, key)
        sides = _sides(key, token, contest)
        ballot = {**progress, "pair": key, "prompt": sides[0].sample.prompt}
        for side in ("left", "right"):
            index = _index(side, token)
            shown, broken = sides[index], key.endswith(CATCH) and index == 1
            # the ending tells the page whether to show a clip
            ending = ".png" if broken else Path(shown.picture).suffix
            if shown.sample.text is not None:
                ballot[side] = {"text": broken_text(shown.sample.text, key) if broken else shown.sample.text}
            else:
                ballot[side] = {"picture": f"api/picture/{a}/{b}/{key}/{side}/{token}{ending}"}
        return ballot

    def _check(
        self, rater: str, contest: dict[str, tuple[Placed, Placed]], given: Collection[str], done: list[str]
    ) -> str | None:
        """A pair that looks at the rater, where one is due: a judged one again, or one with a broken sample."""
        repeated, caught = (sum(key.endswith(end) for key in given) for end in (REPEAT, CATCH))
        if repeated < len(done) // EVERY:
            return done[repeated * EVERY] + REPEAT
        if caught < (len(done) + EVERY - FIRST_CATCH) // EVERY:
            for key in done:
                catch = key + CATCH
                if catch not in given and _breakable(_sides(catch, _token(rater, catch), contest)[1]):
                    return catch
        return None

    def _most_open(
        self,
        contest: dict[str, tuple[Placed, Placed]],
        verdicts: dict[str, dict[str, str]],
        done: list[str],
        left: list[str],
    ) -> str:
        """The pair, of those left to a rater in random order, that the votes leave most open."""
        others = {key for votes in verdicts.values() for key in votes}
        if len(done) % EVERY == EVERY // 2 and (judged := [key for key in left if key in others]):
            return judged[0]
        votes = [(key, WORTH[v]) for given in verdicts.values() for key, v in given.items() if v in WORTH]
        votes = [(key.removesuffix(REPEAT), worth) for key, worth in votes if not key.endswith(CATCH)][-LOOKED_AT:]
        keys = list(dict.fromkeys([*left[:LOOKED_AT], *(key for key, _ in votes)]))
        samples = list({id(placed): placed for key in keys for placed in contest[key]}.values())
        row = {id(placed): i for i, placed in enumerate(samples)}
        shared = set.intersection(*(set(placed.sample.scores) for placed in samples))
        features = np.array([[placed.sample.scores[name] for name in sorted(shared)] for placed in samples], float)
        first, second = np.array([[row[id(placed)] for placed in contest[key]] for key in keys]).T
        model = BradleyTerry(np.nan_to_num(features), first, second)
        model.fit(np.array([keys.index(key) for key, _ in votes], int), np.array([worth for _, worth in votes]))
        return keys[int(model.openness(np.arange(min(len(left), LOOKED_AT))).argmax())]

    def picture(self, a: int, b: int, key: str, side: str, token: str) -> str | bytes:
        """Name in the gallery of a ballot's picture, or a broken one as a PNG; the address hides which it is."""
        contest = self.contest(a, b)
        if plain_of(key) not in contest or side not in ("left", "right"):
            raise Refused("there is no such pair of pictures")
        index = _index(side, token)
        shown = _sides(key, token, contest)[index]
        if shown.sample.text is not None:
            raise Refused("there is no such pair of pictures")
        if key.endswith(CATCH) and index == 1:
            return broken_picture(self.folder / "pictures" / shown.picture, key)
        return shown.picture

    def vote(self, rater: str, a: object, b: object, key: object, verdict: object) -> None:
        """Keep a vote; of a pair with a broken sample the first is the one that is whole."""
        contest = self.contest(a, b)
        if type(key) is not str or plain_of(key) not in contest:
            raise Refused("there is no such pair or verdict")
        if not isinstance(verdict, str) or verdict not in ("left", "right", "tie", "skip"):
            raise Refused("there is no such pair or verdict")
        token = _token(rater, key)
        first, second = _sides(key, token, contest)
        if verdict in ("left", "right"):
            verdict = ("first", "second")[_index(verdict, token)]
        shown = [p.sample.path if p.sample.text is None else p.sample.text for p in (first, second)]
        # both, if the seeds differ
        seed = " and ".join(dict.fromkeys([first.sample.seed, second.sample.seed]))
        self.votes.add(rater, Pair(key, first.sample.prompt, seed, *shown), verdict)

    def preferences(self) -> list[dict[str, str]]:
        """The choices; raises ConfigError where one is on a picture of no run that is shown."""
        return self.votes.preferences(within=[run.folder for run in self.gallery.runs])

    def results(self, a: object, b: object) -> dict[str, Any]:
        """Summary of the votes on two columns, with the commands that train on them."""
        contest = self.contest(a, b)
        scores = {key: (x.sample.scores, y.sample.scores) for key, (x, y) in contest.items()}
        next_steps = commands([run.folder for run in self.gallery.runs], self.folder, self.gallery.texts)
        table = results(self.votes.verdicts(contest), scores)
        choices = table["all"]["wins"] + table["all"]["losses"]
        return table | {"commands": next_steps, "enough": enough(choices)}


def _key(first: Placed, second: Placed) -> str:
    """Key of a pair, the same after a restart; texts add prompt and seed, since those of a moment share a file."""
    named = [str(p.sample.path) for p in (first, second)]
    if first.sample.text is not None:
        named += [first.sample.prompt, first.sample.seed]
    return hashlib.sha256("\n".join(named).encode(errors="surrogateescape")).hexdigest()[:24]


def _differ(first: Placed, second: Placed) -> bool:
    """True if there is a choice: two pictures, or two different texts."""
    one, other = first.sample.text, second.sample.text
    return (one is None and other is None) or (one is not None and other is not None and one != other)


def _draw(rater: str, key: str, purpose: str) -> str:
    """A rater's own random number for a pair, the same after a restart."""
    return hashlib.sha256(f"{purpose}\n{key}\n{rater}".encode(errors="replace")).hexdigest()


def _sides(key: str, token: str, contest: dict[str, tuple[Placed, Placed]]) -> tuple[Placed, Placed]:
    """The two samples of a pair; where one is broken, the other one first."""
    first, second = contest[plain_of(key)]
    return (second, first) if key.endswith(CATCH) and int(token[1], 16) % 2 else (first, second)


def _breakable(placed: Placed) -> bool:
    """Whether a broken sample is told from a whole one at sight; sounds and short texts are not."""
    text = placed.sample.text
    if Path(placed.picture).suffix in SOUNDS:
        return False
    return text is None or len(set(text.split())) >= WORDS


def broken_picture(file: Path, key: str) -> bytes:
    """A picture, or a clip's first frame, with its colours in random order, as a PNG of its size."""
    with Image.open(file) as picture:
        colours = np.asarray(picture.convert("RGB").resize((BLOCKS, BLOCKS))).reshape(-1, 3)
        shuffled = np.random.default_rng(_seed(key)).permutation(colours).reshape(BLOCKS, BLOCKS, 3)
        noise = Image.fromarray(shuffled).resize(picture.size, Image.Resampling.NEAREST)
    out = io.BytesIO()
    noise.save(out, "PNG")
    return out.getvalue()


def broken_text(text: str, key: str) -> str:
    """A text with its words in random order."""
    return " ".join(np.random.default_rng(_seed(key)).permutation(text.split()))


def _seed(key: str) -> int:
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)


def _token(rater: str, key: str) -> str:
    """Which side of a rater's ballot shows which sample; the sides of a repeated pair are swapped."""
    token = _draw(rater, key.removesuffix(REPEAT), "side")[:16]
    return f"{int(token[0], 16) ^ 1:x}{token[1:]}" if key.endswith(REPEAT) else token


def _index(side: str, token: str) -> int:
    """Index in the pair of the sample on this side."""
    flipped = int(token[0], 16) % 2
    return flipped if side == "left" else 1 - flipped
