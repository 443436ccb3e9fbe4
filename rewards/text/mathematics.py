"""Mathematical answers: where a text states its own, as LaTeX that math-verify reads, and whether two are equal.

Nothing here evaluates Python: LaTeX goes through math-verify's grammar, and the strings that it gives to sympy's parser
have digits and signs only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty ",
    "π": r"\pi ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "²": "^2", "³": "^3",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    r"\!": "", "{,}": ",", "**": "^", "<=": r"\le ", ">=": r"\ge ", r"\varnothing": r"\emptyset ",
}  # fmt: skip
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
    (r"√\s*\(", r"\\sqrt("),
    (r"(?<!\\)(?<![a-zA-Z])(sqrt|sin|cos|tan|ln|log|exp|pi)(?![a-zA-Z])", r"\\\1 "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<=[\w)}])\s*\*\s*(?=[\w({\\])", r"\\cdot "),
    # 1 234 567 is one number, and so is 1\,234
    (r"(?<![\d.,])\d{1,3}(?:(?: |\\,|\\ )\d{3})+(?!\d)", lambda found: re.sub(r"\D", "", found[0])),
    # 1 1/2 is a number and a half
    (r"(?<![\d.,^_{])(\d+)\s+(\d+)\s*/\s*(\d+)", r"(\1+\\frac{\2}{\3})"),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1\\times 10^{\2}"),
    (r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\bdegrees?\b|\\degree\b|\\text\s*\{\s*degrees?\s*\})", r"^\\circ "),
    (r"\\(sin|cos|tan)\s*\(?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*\)?", r"\\\1(\\frac{\2\\pi}{180})"),
    (r"(\d*)\.(\d*)\\overline\s*\{?(\d+)\}?", lambda found: _repeating(*found.groups())),
    (r"(?<![a-zA-Z])x\s*\\in(?![a-z])\s*", ""),
    (r"^\\?\{\s*\\?\}$", r"\\emptyset"),
    # what (x, y) is
    (r"^\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)\s*=\s*", ""),
    (r"^\+\s*", ""),
]  # fmt: skip
_REWRITTEN = [(re.compile(pattern), by) for pattern, by in _REWRITES]

# lengths in metres, times in seconds, masses in kilogrammes, volumes in litres, angles in degrees
_UNITS = {
    "mm": ("m", "0.001"), "cm": ("m", "0.01"), "dm": ("m", "0.1"), "m": ("m", "1"), "km": ("m", "1000"),
    "meter": ("m", "1"), "metre": ("m", "1"), "kilometer": ("m", "1000"), "kilometre": ("m", "1000"),
    "centimeter": ("m", "0.01"), "centimetre": ("m", "0.01"), "millimeter": ("m", "0.001"),
    "in": ("m", "0.0254"), "inch": ("m", "0.0254"), "inches": ("m", "0.0254"), "ft": ("m", "0.3048"),
    "foot": ("m", "0.3048"), "feet": ("m", "0.3048"), "yard": ("m", "0.9144"), "mile": ("m", "1609.344"),
    "s": ("s", "1"), "sec": ("s", "1"), "second": ("s", "1"), "min": ("s", "60"), "minute": ("s", "60"),
    "h": ("s", "3600"), "hr": ("s", "3600"), "hour": ("s", "3600"), "day": ("s", "86400"), "week": ("s", "604800"),
    "mg": ("kg", "0.000001"), "g": ("kg", "0.001"), "gram": ("kg", "0.001"), "kg": ("kg", "1"),
    "kilogram": ("kg", "1"), "ml": ("l", "0.001"), "l": ("l", "1"), "liter": ("l", "1"), "litre": ("l", "1"),
    "cent": ("dollar", "0.01"), "dollar": ("dollar", "1"),
    r"^\circ": ("degree", "1"), "radian": ("radian", "1"), "rad": ("radian", "1"),
}  # fmt: skip
_UNIT = re.compile(
    r"(?<=[\d)}])(?:\s*\\?,?\s*\\(?:text|mathrm|mbox|textrm)\s*\{\s*([a-zA-Z]+)\.?\s*\}|(?:\s|\\,|\\ )+([a-zA-Z]+)"
    r"|\s*(\^\\circ))\s*(?:\^\s*\{?\s*([23])\s*\}?)?\s*$"
)
_MODULUS = re.compile(r"\s*\(?\s*\\?[bp]?mod(?![a-z])\s*[({]?\s*(\d+)\s*[)}]?\s*\)?\s*$")
_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\quad|\\text\{\s*(?:and|or)\s*\}|and|or)*")
_FUNCTIONS_AND_UNITS = re.compile(r"\\[a-zA-Z]+|\b(?:mod|and|or|" + "|".join(filter(str.isalpha, _UNITS)) + r")s?\b")
_PROSE = re.compile(r"[a-zA-Z]{3}|\b(?:so|it|is|we|to|of|as|be|do|no|at|by|an|if)\b|[.?!:]\s")
_STATES = re.compile(r".*(?:\b(?:is|are|equals)\b:?|:\s|####|(?<![<>!\\])=)(.+)", re.DOTALL)
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{\s*([^{}\\]*?)\s*\}|([A-Za-z][A-Za-z' -]{2,})")


def _repeating(whole: str, fixed: str, period: str) -> str:
    scale = 10 ** len(fixed)
    value = Fraction(int((whole or "0") + fixed), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def stated(text: str) -> str | None:
    r"""The answer that a text states, or None where it takes a search for formulas to find one.

    What stands before `</think>` is not the answer; what stands in <answer> is. The last \boxed or \fbox is, with those
    right before it; a box that is never closed goes to the end. Without boxes it is the last line where that is a
    formula, or what follows its last 'is', ':', '####' or '='.
    """
    text = text.rpartition("</think>")[2].strip()
    text = (re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text])[-1].strip()
    boxes = _last_boxes(text)
    if boxes:
        return ", ".join(boxes)
    line = _bare(text.splitlines()[-1]) if text else ""
    if line and _formula(line):
        return line
    says = _STATES.fullmatch(line)
    said = _bare(says[1]) if says else ""
    return said if said and _formula(said) else None


def _formula(text: str) -> bool:
    return "$" not in text and not _PROSE.search(_FUNCTIONS_AND_UNITS.sub(" ", _rewritten(text)))


def _bare(text: str) -> str:
    """Without the signs around a formula: dollars, brackets of LaTeX, stars, stops."""
    text = text.strip().lstrip("#").strip().rstrip(".,;:").strip()
    for pattern in (r"\*\*(.+)\*\*", r"\$\$?([^$]+)\$\$?", r"\\\((.+)\\\)", r"\\\[(.+)\\\]", r"\\?\$(\s*[\d.].*)"):
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found:
            return _bare(found[1])
    return text


def _last_boxes(text: str) -> list[str]:
    boxes: list[str] = []
    end = 0
    for start in _BOX.finditer(text):
        if start.start() < end:
            continue
        if boxes and not _BETWEEN_BOXES.fullmatch(text, end, start.start()):
            boxes = []
        if text[start.end() : start.end() + 1] != "{":
            content, end = re.match(r"[^\s.$]*", text[start.end() :])[0], start.end()  # type: ignore[index]
        else:
            closing = _closing(text, start.end())
            content, end = text[start.end() + 1 : closing], closing + 1
        boxes.append(content.strip())
    return list(dict.fromkeys(boxes))


def _closing(text: str, opening: int) -> int:
    """The place of the brace that closes the one at `opening`; the text's end where none does."""
    depth = 0
    for place in re.finditer(r"(?<!\\)[{}]", text[opening:]):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return opening + place.start()
    return len(text)


def _rewritten(text: str) -> str:
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    for pattern, by in _REWRITTEN:
        text = pattern.sub(by, text)
    return text.strip()


@dataclass
class Answer:
    """An answer, taken apart.

    Attributes:
        latex: what is left for math-verify to read.
        unit: dimension, power and size of a known unit.
        modulus: of '(mod 7)'.
        words: where the answer is words and no formula.
    """

    latex: str
    unit: tuple[str, int, Fraction] | None = None
    modulus: int | None = None
    words: str | None = None

    @classmethod
    def of(cls, text: str) -> "Answer":
        """From an answer as it is written, in LaTeX or plain."""
        text = _bare(text)
        word = _WORDS.fullmatch(text)
        words = (word[1] or word[2] or "").casefold() if word and _PROSE.search(text) else ""
        latex = _rewritten(text)
        modulus = _MODULUS.search(latex)
        latex = _MODULUS.sub("", latex)
        unit = _UNIT.search(latex)
        known = None
        if unit:
            name, power = (unit[1] or unit[2] or unit[3]), int(unit[4] or 1)
            kind = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.lower().removesuffix("s"))
            if kind:
                known = (kind[0], power, Fraction(kind[1]) ** power)
                latex = latex[: unit.start()]
        if re.fullmatch(r"[A-Za-z ]+", words) is None or (latex.startswith("\\") and not text.startswith("\\")):
            words = ""
        return cls(latex, known, int(modulus[1]) if modulus else None, words or None)

    def read(self) -> list[Any]:
        """As sympy's expressions, decimals as the fractions that they are; [] where it cannot be read."""
        from math_verify import LatexExtractionConfig, parse

        if not self.latex:
            return []
        # its own time limits need a main thread's signals
        return exact(parse(f"\\boxed{{{self.latex}}}", [LatexExtractionConfig()], parsing_timeout=None))


def exact(expressions: list[Any]) -> list[Any]:
    """Decimals as fractions, i as the imaginary unit, symbols without assumptions of their own; strings as they are."""
    from sympy import Basic, Float, I, Rational, Symbol

    found = []
    for expression in expressions:
        if isinstance(expression, Basic):
            new: dict[Basic, Basic] = {number: Rational(str(number)) for number in expression.atoms(Float)}
            for symbol in expression.atoms(Symbol):
                new[symbol] = I if symbol.name in ("i", "imath") else Symbol(symbol.name, real=True)
            if any(old != by for old, by in new.items()):
                expression = expression.xreplace(new)
        found.append(expression)
    return found


def equal(right: Answer, text: str) -> bool:
    """Whether a text gives the right answer.

    Units that both have must be of one kind, and count: 500 cm is 5 m. One alone is not looked at, as in most data, and
    so it is with '(mod 7)'. A pair is no set, and a decimal means what it says: 0.33 is not 1/3.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    said = stated(text)
    if said is None:
        after = text.rpartition("</think>")[2]
        if right.words:
            says = _STATES.fullmatch(after)
            return right.words in (_bare(after).casefold(), _bare(says[1]).casefold() if says else "")
        ways = [ExprExtractionConfig(), LatexExtractionConfig()]
        given, expressions = None, exact(parse(after, ways, parsing_timeout=None))
    else:
        given = Answer.of(said)
        if _differ(right, given):
            return False
        if right.words and given.words:
            return right.words == given.words
        if _opens(right.latex) == "(" and "," in given.latex and not _opens(given.latex):
            given.latex = f"({given.latex})"
        expressions = given.read()
    wanted = right.read()
    if given and right.unit and given.unit and right.unit[2] != given.unit[2]:
        from sympy import Basic, Rational

        factor = Rational(str(given.unit[2] / right.unit[2]))
        expressions = [expression * factor for expression in expressions if isinstance(expression, Basic)]
    # numbers to 40 digits: 3.14159265358979 is not pi
    same: bool = verify(
        wanted, expressions, numeric_precision=40, float_rounding=40, allow_set_relation_comp=True, timeout_seconds=None
    )
    return same


def _differ(right: Answer, given: Answer) -> bool:
    """Whether unit, modulus or brackets tell two answers apart."""
    if right.unit and given.unit and right.unit[:2] != given.unit[:2]:
        return True
    if right.modulus and given.modulus and right.modulus != given.modulus:
        return True
    return {_opens(right.latex), _opens(given.latex)} == {"{", "("}


def _opens(latex: str) -> str:
    """The bracket that holds all of a list, '{' or '(', or '' without one."""
    latex = re.sub(r"\\(?:left|right)\s*", "", latex).strip()
    for bracket, pattern in (("{", r"\\?\{[^{}]*,[^{}]*\\?\}"), ("(", r"\([^()]*,[^()]*\)")):
        if re.fullmatch(pattern, latex):
            return bracket
    return ""
