"""What every test gets: no network, no trackers, no display, and the same random numbers each time."""

import os

# Before anything imports the Hugging Face libraries, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ["MPLBACKEND"] = "Agg"

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test starts from the same global seeds, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
