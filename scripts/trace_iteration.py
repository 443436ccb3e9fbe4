"""What one iteration passes through: files and functions of the project, and calls from lower layers to higher ones.

    python scripts/trace_iteration.py tiny_sd3/flow_grpo tiny_sd3/nft --calls

The second iteration is traced by `sys.setprofile`, so that what happens once is left out. A call upwards is one
from a package below into a package above it, in the order of `tests/flowalign/test_layers.py`. Those of samplers, which
are given a velocity function, and of rewards are listed, and not counted.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import ast
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from flowalign.config import load, recipe
from flowalign.training import Trainer

ROOT = Path(__file__).parents[1]
RECIPES = ["tiny_sd3/flow_grpo", "tiny_sd3/nft", "tiny_sd3/draft", "tiny_lm/grpo"]
SMALL = ["iterations=2", "prompts_per_iteration=4", "previews=0", "checkpoint_every=0"]
NESTED = "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>", "<module>"
"""Names of code that is a part of the function around it."""


def layers() -> list[str]:
    """The packages from the lowest to the highest one, as the tests have them."""
    tree = ast.parse((ROOT / "tests" / "flowalign" / "test_layers.py").read_text())
    [rooms] = [
        node.value.func.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ROOMS"
    ]
    return ["samplers", "rewards", *(f"flowalign/{room}" for room in rooms.split())]


class Trace:
    """Counts the project's functions that are called while it is in force, in all threads."""

    def __init__(self) -> None:
        self.layers = layers()
        self.functions: Counter[tuple[str, str]] = Counter()
        self.upwards: Counter[str] = Counter()

    def __enter__(self) -> "Trace":
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        name, file = frame.f_code.co_qualname, self._file(frame)
        if event != "call" or file is None:
            return
        if frame.f_code.co_name not in NESTED:
            self.functions[file, name] += 1
        before = frame.f_back
        # torch, contextlib and the like stand between the project's functions
        while before is not None and self._file(before) is None:
            before = before.f_back
        if before is None:
            return
        caller = self._file(before)
        assert caller is not None
        if self._layer(caller) < self._layer(file):
            self.upwards[f"{caller}:{before.f_code.co_qualname} -> {file}:{name}"] += 1

    def _file(self, frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return None
        file = path.relative_to(ROOT).as_posix()
        return file if file.startswith(("flowalign/", "rewards/", "samplers/")) else None

    def _layer(self, file: str) -> int:
        parts = file.removesuffix(".py").split("/")
        return self.layers.index("/".join(parts[:2]) if parts[0] == "flowalign" else parts[0])


def trace(path: str, overrides: list[str]) -> Trace:
    """One iteration of a recipe, after one that is not looked at."""
    with tempfile.TemporaryDirectory() as folder:
        small = [*(f"training.{setting}" for setting in SMALL), "evaluation.prompts=null", f"output={folder}"]
        trainer = Trainer(load(recipe(path), [*small, "name=run", *overrides]), progress=False)
        trainer.iterate()
        trainer.iteration += 1
        with Trace() as traced:
            trainer.iterate()
    return traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, help=f"default: {', '.join(RECIPES)}")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all recipes")
    parser.add_argument("--calls", action="store_true", help="list the files with their functions")
    given = parser.parse_args()
    for path in given.recipes:
        traced = trace(path, given.set)
        files = sorted({file for file, _ in traced.functions})
        inside = sum(call.startswith("flowalign/") for call in traced.upwards)
        print(f"{path}: {len(files)} files, {len(traced.functions)} functions, {inside} calls upwards in flowalign")
        for call, count in traced.upwards.items():
            print(f"    upwards, {count} times: {call}")
        for file in files if given.calls else ():
            print(f"    {file}: {', '.join(name for other, name in traced.functions if other == file)}")


if __name__ == "__main__":
    main()
