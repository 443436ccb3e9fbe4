"""The size of the house, read from its source: long functions, types that say nothing, what the trainer leans on."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_words import PRODUCT, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def long_functions(files: dict[str, str], lines: int = 60) -> list[str]:
    return [
        f"{file}: {function.name}"
        for file, source in files.items()
        for function in functions(source)
        if (function.end_lineno or 0) - function.lineno >= lines
    ]


def untyped(files: dict[str, str]) -> list[str]:
    """Named parameters and results that are annotated as `Any` and nothing else."""
    found = []
    for file, source in files.items():
        for function in functions(source):
            given = function.args
            named = {each.arg: each.annotation for each in given.posonlyargs + given.args + given.kwonlyargs}
            named["->"] = function.returns
            said = {name for name, hint in named.items() if isinstance(hint, ast.Name) and hint.id == "Any"}
            found += [f"{file}: {function.name} {name}" for name in sorted(said)]
    return found


def test_few_functions_are_long() -> None:
    names = long_functions(sources(PRODUCT))
    assert len(names) <= 8, names


def test_few_types_say_nothing_and_none_of_them_in_a_method() -> None:
    names = untyped(sources(PRODUCT))
    assert len(names) <= 175, names
    assert [name for name in names if "algorithms" in Path(name.partition(":")[0]).parts] == []


def module(path: str) -> ast.Module:
    [source] = [source for file, source in sources([str(Path(path).parent)]).items() if file.endswith(path)]
    return ast.parse(source)


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_the_trainer_leans_on_few_modules_and_is_short_to_make() -> None:
    trainer = module("flowalign/training/trainer.py")
    imports = [node for node in ast.walk(trainer) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) <= 22
    assert long_functions({"trainer": ast.unparse(trainer)}, 50) == []


def test_an_algorithm_declares_little() -> None:
    [algorithm] = [kind for kind in classes(module("flowalign/algorithms/base.py")) if kind.name == "Algorithm"]
    assert len([entry for entry in algorithm.body if isinstance(entry, ast.Assign | ast.AnnAssign)]) <= 7


def test_few_classes_share_a_name() -> None:
    names = Counter(kind.name for source in sources(PRODUCT).values() for kind in classes(ast.parse(source)))
    twice = [name for name, count in names.items() if count > 1]
    assert len(twice) <= 5, twice


def test_what_is_too_much_is_seen() -> None:
    long = "def long(x: Any, *, y: Any = 1, **rest: Any) -> Any:\n" + "    pass\n" * 60
    files = {"a.py": f"{long}\n\ndef short(x: int) -> None:\n    pass\n"}
    assert long_functions(files) == ["a.py: long"]
    assert untyped(files) == ["a.py: long ->", "a.py: long x", "a.py: long y"]


def test_shipped_models_do_not_name_the_folder_that_they_were_made_in() -> None:
    files = list((Path(__file__).parents[1] / "flowalign" / "data" / "assets").rglob("*.json"))
    assert files and not [file for file in files if "_name_or_path" in file.read_text(encoding="utf-8")]
