"""Words that readers meet everywhere: docstrings of fields, names of classes, records made by name."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("samplers", "rewards", "flowalign")


def sources(folders: Sequence[str]) -> dict[str, str]:
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def field_docstrings(tree: ast.Module) -> Iterator[str]:
    """Strings that follow an assignment in a module, a class or a function."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for field, after in zip(node.body, node.body[1:]):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(text, str):
                yield text


def torsos(files: dict[str, str]) -> list[str]:
    """Docstrings of fields that end a sentence begun elsewhere: "of each group" in the place of "Best of a group"."""
    found = []
    for file, source in files.items():
        for text in field_docstrings(ast.parse(source)):
            if text.split()[0].lower().strip(",:") in ("of", "what", "that", "and"):
                found.append(f"{file}: {text}")
    return found


def repeated(files: dict[str, str]) -> dict[str, list[str]]:
    """Names of classes at the top of more than one file."""
    owners = defaultdict(list)
    for file, source in files.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(file)
    return {name: where for name, where in owners.items() if len(where) > 1}


def positional(files: dict[str, str], classes: set[str]) -> list[str]:
    """Calls of these classes with eight positional arguments or more, which nobody can check by reading."""
    found = []
    for file, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and len(node.args) >= 8:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in classes:
                    found.append(f"{file}, line {node.lineno}: {name}")
    return found


def test_docstrings_of_fields_are_whole_phrases() -> None:
    assert torsos(sources(PRODUCT)) == []


def test_few_names_of_classes_stand_for_two() -> None:
    names = repeated(sources(PRODUCT))
    assert len(names) <= 5, names


def test_records_of_many_fields_are_made_by_name() -> None:
    product = sources(PRODUCT)
    trees = [ast.parse(source) for source in product.values()]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert positional(product, classes) == []


@pytest.mark.parametrize("word", ["of", "What", "that", "and"])
def test_what_is_looked_for_is_seen(word: str) -> None:
    files = {
        "a.py": f'class Pair:\n    first: int\n    """{word} each pair"""\n    second: int\n    """Second of it."""\n',
        "b.py": "class Pair:\n    pass\n\n\nPair(1, 2, 3, 4, 5, 6, 7, 8)\nPair(1, 2, 3, 4, 5, 6, 7, second=8)\n",
    }
    assert torsos(files) == [f"a.py: {word} each pair"]
    assert repeated(files) == {"Pair": ["a.py", "b.py"]}
    assert positional(files, {"Pair"}) == ["b.py, line 5: Pair"]
