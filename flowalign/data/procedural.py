"""Prompts that a program makes, as many and as hard as wanted, so that no model can have seen their answers."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

SIGNS = {"+": 1, "-": 1, "*": 2}
"""Operators with their precedence."""


def sums(count: int, terms: int, digits: int, operators: Sequence[str] = "+-", seed: int = 0) -> list[dict[str, Any]]:
    """Arithmetic expressions with their values (RandomCalculation, arXiv 2507.10532), none twice.

    Args:
        terms: numbers in an expression.
        digits: largest number of digits of one.

    Raises:
        ValueError: there are not so many different expressions.
    """
    randomness = random.Random(seed)
    most = (10**digits) ** terms * len(operators) ** (terms - 1)
    if count > most // 2:
        raise ValueError(
            f"{count} different expressions of {terms} terms: there are {most}, and half of them can be drawn"
        )
    made: dict[str, int] = {}
    while len(made) < count:
        numbers = [randomness.randrange(10**digits) for _ in range(terms)]
        signs = [randomness.choice(operators) for _ in range(terms - 1)]
        text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:], strict=True))
        made[text] = value_of(numbers, signs)
    return [{"prompt": f"{text}=", "answer": str(value), "terms": terms} for text, value in made.items()]


def value_of(numbers: Sequence[int], signs: Sequence[str]) -> int:
    """Value of numbers with signs between them; products come before sums."""
    total, product, sign = 0, numbers[0], 1
    for operator, number in zip(signs, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        else:
            total += sign * product
            product, sign = number, 1 if operator == "+" else -1
    return total + sign * product


KINDS = ("satisfiable", "assignment", "count")
"""Questions about a formula: whether it can be true, by which values, by how many of them."""


def formulas(count: int, variables: int, clauses: int, kind: str, seed: int = 0) -> list[dict[str, Any]]:
    """Questions about formulas in conjunctive normal form of three literals a clause (after SATQuest's abstract, arXiv
    2509.00930), answered by trying all assignments.

    Args:
        variables: at least 3 and at most 12, so that all assignments can be tried.
        kind: one of `KINDS`; of an 'assignment' all formulas can be true.
    """
    if not 3 <= variables <= 12:
        raise ValueError(f"formulas of {variables} variables: from 3 to 12 work")
    randomness = random.Random(seed)
    places = list(combinations(range(1, variables + 1), 3))
    records: list[dict[str, Any]] = []
    while len(records) < count:
        formula = [[place * randomness.choice((1, -1)) for place in randomness.choice(places)] for _ in range(clauses)]
        models = sum(1 for values in assignments(variables) if holds(formula, values))
        if kind == "assignment" and models == 0:
            continue
        answer = {"satisfiable": "yes" if models else "no", "count": str(models), "assignment": ""}[kind]
        records.append(
            {"prompt": question(formula, variables, kind), "answer": answer, "clauses": formula, "kind": kind}
        )
    return records


def assignments(variables: int) -> Iterator[list[bool]]:
    """All values of the variables."""
    for number in range(2**variables):
        yield [bool(number >> place & 1) for place in range(variables)]


def holds(formula: Sequence[Sequence[int]], values: Sequence[bool]) -> bool:
    """Whether each clause has a literal that is true."""
    return all(any(values[abs(literal) - 1] == (literal > 0) for literal in clause) for clause in formula)


def question(formula: Sequence[Sequence[int]], variables: int, kind: str) -> str:
    """A formula and what is asked about it, in words."""
    named = (
        " or ".join(("" if literal > 0 else "not ") + f"x{abs(literal)}" for literal in clause) for clause in formula
    )
    asks = {
        "satisfiable": "Can it be true? Answer with yes or no.",
        "count": f"How many of the {2**variables} assignments make it true? Answer with a number.",
        "assignment": f"Which values make it true? Answer with a list such as x1=1, x2=0 for x1 to x{variables}.",
    }
    return f"A formula: ({') and ('.join(named)}). {asks[kind]}"
