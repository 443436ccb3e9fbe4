"""Verifiers: is the answer of a text the right one? 1 or 0, the right answer being in the prompt's metadata."""

import logging
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from rewards.base import Metadata, RewardError, Scores, Spec
from rewards.text.mathematics import Answer, equal, stated

logger = logging.getLogger(__name__)
_NEEDS = frozenset({"text", "prompt", "metadata"})


def answers(
    name: str, prompts: Sequence[str], metadata: Metadata, key: str, pattern: re.Pattern[str] | None = None
) -> list[str]:
    """The right answer of each prompt, from its metadata.

    Args:
        pattern: its first group is the answer, its last match counting; default the whole of what is there.

    Raises:
        RewardError: a prompt has none.
    """
    right = []
    for prompt, record in zip(prompts, metadata, strict=True):
        if key not in record:
            raise RewardError(f"reward '{name}' needs the right answer; the prompt {prompt!r} has no '{key}'")
        answer = str(record[key]) if pattern is None else _last(pattern, str(record[key]))
        if answer is None:
            raise RewardError(f"reward '{name}': answer_pattern finds nothing under '{key}' of the prompt {prompt!r}")
        right.append(answer)
    return right


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(pattern, re.DOTALL)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match."""
    answers = pattern.findall(text)
    return str(answers[-1]).strip() if answers else None


class ExactMatch:
    """1 where the text is the answer, apart from white space around it; an empty text is wrong.

    Args:
        key: key of the answer in the metadata.
        pattern: a regular expression whose first group is the text's answer, its last match counting; a text without
            a match is wrong. Default: the whole text.
        ignore_case: "Yes" is "yes".
        answer_pattern: as `pattern`, of the answer in what the metadata has, such as GSM8K's '#### (\\S+)'.
    """

    name = "exact_match"
    spec = Spec(_NEEDS)

    def __init__(
        self,
        key: str = "answer",
        pattern: str | None = None,
        ignore_case: bool = False,
        answer_pattern: str | None = None,
    ) -> None:
        self.key, self.pattern, self.answer_pattern = key, _compiled(pattern), _compiled(answer_pattern)
        self.same = str.lower if ignore_case else str

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = answers(self.name, prompts, metadata, self.key, self.answer_pattern)
        value = [
            float(given is not None and self.same(given) == self.same(answer.strip()))
            for given, answer in zip(map(self.given, samples), right, strict=True)
        ]
        return Scores(torch.tensor(value))

    def given(self, text: str) -> str | None:
        """The answer that a text gives."""
        return (text.strip() if self.pattern is None else _last(self.pattern, text)) or None


class MultipleChoice:
    r"""1 where the option that a text decides for is the right one: 'B', '(b)', 'B. A dog', '**B**'.

    The decision is the last \boxed{} or <answer> where there is one; else what the last 'the answer is', 'I choose' or
    'option ... is right' names; else an option that the text begins with, unless the text takes it back; else the last
    one named. A decision for two options is none. What stands before `</think>` is not looked at.

    Args:
        key: key of the right option's letter in the metadata.
        options: the letters.
    """

    name = "multiple_choice"
    spec = Spec(_NEEDS)

    def __init__(self, key: str = "answer", options: str = "ABCD") -> None:
        self.key = key
        capital = f"[{re.escape(options.upper())}]"
        either = f"[{re.escape(options.upper() + options.lower())}]"
        mark = r"[\s(\[*_`'\"$:]*"
        article = r"(?:(?<!A)|(?! +(?!(?:is|was|or|and|because|since|as)\b)[a-z]))"
        self.boxed = re.compile(r"\\boxed\s*\{(.*)|<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
        self.inside = re.compile(rf"\W*(?:text\w*|mathrm|mathbf)?\W*({either})(?![A-Za-z])", re.ASCII)
        self.refused = re.compile(
            rf"\b(?i:not)(?: (?i:option))?[ (*]+{capital}(?![A-Za-z])"
            rf"|(?<![A-Za-z'])(?:(?i:option) )?\(?{capital}\)? (?i:is|was|are)(?: (?:not|wrong|incorrect|false)\b|n't)"
        )
        self.stated = re.compile(
            rf"(?:(?i:\banswer|\bchoice)\b[^.\n]{{0,40}}?(?:\b(?i:is|be)\b(?! not)|:)(?:\s+(?i:option|choice))?"
            r"|\b(?i:choose|pick|select|go (?:with|for))(?:\s+(?i:option|choice))?)"
            rf"{mark}({either})(?![A-Za-z]){article}"
            rf"|(?<![A-Za-z'])({capital})\W+(?i:is (?:the )?(?:right|correct|true|best))"
        )
        self.first = re.compile(
            rf"{mark}(?:(?i:option) )?(?:({either})(?=[)\]*`'\".,:;]|\s*$)|({capital})(?=[\s-]){article})", re.MULTILINE
        )
        self.named = re.compile(rf"(?<![A-Za-z'])({capital})(?![A-Za-z]|'[a-rt-z]){article}|\(({either})\)")
        self.another = re.compile(rf"[\s)*]*(?:or|and|/|,)\s*\(?{capital}(?![A-Za-z'])")
        self.takes_back = re.compile(r"\b(?:rather|wait|actually|correction|no|sorry|instead|I mean)\b", re.IGNORECASE)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = answers(self.name, prompts, metadata, self.key)
        value = [
            float(self.decided(text) == answer.strip().upper()) for text, answer in zip(samples, right, strict=True)
        ]
        return Scores(torch.tensor(value))

    def decided(self, text: str) -> str | None:
        """The option that a text decides for, a capital letter."""
        text = text.rpartition("</think>")[2].strip()
        boxes = list(self.boxed.finditer(text))
        if boxes:
            inside = self.inside.match(next(filter(None, boxes[-1].groups()), ""))
            return inside[1].upper() if inside else None
        text = self.refused.sub("", text)
        statements, first = list(self.stated.finditer(text)), self.first.match(text)
        if statements:
            decision = statements[-1]
        elif first and not self.takes_back.search(text, first.end()):
            decision = first
        else:
            named = list(self.named.finditer(text))
            return next(filter(None, named[-1].groups())).upper() if named else None
        return None if self.another.match(text, decision.end()) else next(filter(None, decision.groups())).upper()


Verdict = Literal["right", "wrong", "slow", "unreadable"]
"""Judgement of a text's answer; 'unreadable' means that the right answer could not be read."""


class Maths:
    """1 where the text's last mathematical answer equals the right one, by the math-verify library (extra `maths`).

    '1/2', '0.5' and '\\boxed{\\frac{1}{2}}' are equal; an expression that cannot be read is wrong.
    `rewards.text.mathematics` says what a text's answer is (`stated`) and what is equal (`equal`). The right answer is
    read whole, as verl does: 2\\sqrt{3}, (1, 2) and \\text{Evelyn} need no dollars. Where it cannot be read as
    mathematics the text teaches nothing: it gets 0 with weight 0, the part `maths_unreadable` is 1, and a warning names
    the prompt. Texts are checked in processes of their own: one that takes too long is stopped and counts as wrong, and
    the part `maths_timeout` says how often that happens.

    Args:
        key: key of the answer in the metadata, LaTeX or plain.
        timeout: seconds for one text.
        workers: texts checked at a time.
        answer_pattern: a regular expression whose first group is the answer in what the metadata has, its last match
            counting, such as GSM8K's '#### (\\S+)'. Default: all of it.
    """

    name = "maths"
    spec = Spec(_NEEDS)

    def __init__(
        self, key: str = "answer", timeout: float = 5.0, workers: int = 2, answer_pattern: str | None = None
    ) -> None:
        if find_spec("math_verify") is None:
            raise ImportError("maths needs math-verify; pip install 'flowalign[maths]'")
        self.key, self.timeout, self.answer_pattern = key, timeout, _compiled(answer_pattern)
        self._checkers = [_Checker() for _ in range(workers)]
        self._warned: set[str] = set()

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = answers(self.name, prompts, metadata, self.key, self.answer_pattern)
        idle: SimpleQueue[_Checker] = SimpleQueue()
        for checker in self._checkers:
            idle.put(checker)

        def checked(text: str, answer: str) -> Verdict:
            checker = idle.get()
            try:
                return checker.check(text, answer, self.timeout)
            finally:
                idle.put(checker)

        with ThreadPoolExecutor(len(self._checkers)) as threads:
            verdicts = list(threads.map(checked, samples, right))
        for prompt, answer, verdict in zip(prompts, right, verdicts, strict=True):
            if verdict == "unreadable" and prompt not in self._warned:
                self._warned.add(prompt)
                logger.warning(
                    "reward 'maths': the right answer %r of the prompt %r cannot be read as mathematics, so that its "
                    "texts teach nothing; exact_match may suit it",
                    answer,
                    prompt,
                )

        def share(kind: Verdict) -> Tensor:
            return torch.tensor([float(verdict == kind) for verdict in verdicts])

        unreadable = share("unreadable")
        shares = {"maths_timeout": share("slow"), "maths_unreadable": unreadable}
        return Scores(share("right"), shares, weight=1 - unreadable)


class _Checker:
    """A process that compares answers, started when it is first needed and again when it had to be stopped."""

    def __init__(self) -> None:
        self.process: SpawnProcess | None = None

    def check(self, text: str, answer: str, timeout: float) -> Verdict:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_answer_checks, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
            # the libraries load before the clock starts
            self.pipe.recv()
        self.pipe.send((text, answer))
        if self.pipe.poll(timeout):
            # a check that takes all memory may end its process
            with suppress(EOFError):
                verdict: Verdict = self.pipe.recv()
                return verdict
        self.process.kill()
        self.process.join()
        self.process = None
        return "slow"


def _answer_checks(pipe: Connection) -> None:
    import math_verify  # noqa: F401  (it loads before the clock starts)

    pipe.send(True)
    while True:
        try:
            text, answer = pipe.recv()
        except EOFError:
            return
        try:
            verdict = _verdict(text, answer)
        # sympy meets whatever a model writes: numbers of too many digits, brackets too deep
        except Exception:
            verdict = "wrong"
        pipe.send(verdict)


def _verdict(text: str, answer: str) -> Verdict:
    right = Answer.of(stated(answer) or answer)
    if not right.words and not right.read():
        return "unreadable"
    return "right" if equal(right, text) else "wrong"
