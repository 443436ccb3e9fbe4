"""Made run folders, by the generator beside."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def maker() -> ModuleType:
    """make_run.py, which is also a script."""
    spec = importlib.util.spec_from_file_location("make_run", Path(__file__).with_name("make_run.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(maker: ModuleType, tmp_path: Path) -> Path:
    """A run of 12 prompts at 4 moments."""
    return maker.make_run(tmp_path / "run", prompts=12)
