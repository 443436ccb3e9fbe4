"""The shipped tiny language model as rewards ask it, and a second one of the same tokens."""

from pathlib import Path

import pytest
import torch

from rewards.text.model import CausalModel

TINY_LM = Path(__file__).parents[3] / "flowalign" / "data" / "assets" / "tiny_lm"


@pytest.fixture(scope="session")
def tiny_lm() -> str:
    return str(TINY_LM)


@pytest.fixture(scope="session")
def model(tiny_lm: str) -> CausalModel:
    return CausalModel.load(tiny_lm, "cpu")


@pytest.fixture(scope="session")
def other_lm(tiny_lm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model a little off."""
    made = CausalModel.load(tiny_lm, "cpu")
    torch.manual_seed(0)
    for parameter in made.network.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("other")
    made.network.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)
