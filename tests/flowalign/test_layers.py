"""The plan of the packages, read from their source: imports point one way, and no file of a method leans on another."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from flowalign.registry import names

ROOT = Path(__file__).parents[2]
ROOMS = """
errors settings core runs data registry policies config rollouts evaluation algorithms search training reward_training
planning app
""".split()
"""of flowalign; each imports from those before it"""
LAYERS = ["samplers", "rewards", *(f"flowalign.{room}" for room in ROOMS), "flowalign.__main__", "flowalign"]
"""`flowalign` itself is the front door"""
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("samplers", "rewards", "flowalign")
    for file in (ROOT / package).rglob("*.py")
}


def imports(file: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in MODULES else name.rpartition(".")[0] or name for name in names}


IMPORTS = {name: imports(file) for name, file in MODULES.items()}


def layer(module: str) -> int:
    package, _, rest = module.partition(".")
    return LAYERS.index(f"{package}.{rest.partition('.')[0]}" if package == "flowalign" and rest else package)


def test_imports_point_one_way():
    pairs = [(name, other) for name, found in IMPORTS.items() for other in found if other in MODULES]
    assert len(pairs) > 500
    assert [f"{name} -> {other}" for name, other in pairs if layer(other) > layer(name)] == []


def test_no_imports_form_a_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_the_core_knows_no_library_of_models():
    core = {name for name in MODULES if name.startswith("flowalign.core.")}
    libraries = {other.partition(".")[0] for name in core for other in IMPORTS[name]}
    assert "torch" in libraries and not libraries & {"diffusers", "transformers", "peft", "accelerate"}


def test_no_file_of_a_method_is_long_and_none_imports_another():
    methods = {path.partition(":")[0] for path in [*names("algorithms").values(), *names("searches").values()]}
    assert len(methods) == len(names("algorithms")) + len(names("searches"))
    for name in methods:
        assert len(MODULES[name].read_text().splitlines()) <= 200, name
        assert not IMPORTS[name] & methods, name


def test_the_rooms_are_few():
    entries = [entry.name for entry in (ROOT / "flowalign").iterdir() if entry.name != "__pycache__"]
    assert len(entries) <= 19, entries
