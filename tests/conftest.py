"""What every test gets: no network, no trackers, no display, and the same random numbers each time."""

import os

# Containers often forbid bytecode, and then every process started by a test compiles torch
# and diffusers anew: ten seconds each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Networks this small gain nothing from a second thread, which mostly waits; processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# On a GPU float32 is compared with a CPU's.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
# Before anything imports the Hugging Face libraries, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["MPLBACKEND"] = "Agg"

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process works on them alone at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at millions of objects again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test starts from the same global seeds, whichever tests ran before it."""
    # here, so that the process that hands out the files hands them out at once
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_policy() -> Callable[..., Any]:
    """Makes fresh policies over the shipped pipeline: tiny_policy(dtype=..., encode_options=...)."""
    # here, so that tests of samplers and rewards do without these imports
    from flowalign.data import ASSETS
    from flowalign.policies.diffusion import DiffusersPolicy

    def make(**settings: Any) -> DiffusersPolicy:
        settings = {"encode_options": {"max_sequence_length": 0}} | settings
        return DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3", **settings)

    return make
