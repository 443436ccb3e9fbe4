import pytest

from flowalign.config import load
from flowalign.planning.rates import rate_notes


def notes(*overrides: str) -> list[str]:
    recipe = "configs/tiny_sd3/flow_grpo.yaml"
    return list(rate_notes(load(recipe), load(recipe, list(overrides))))


def test_a_recipe_as_it_is_needs_no_other_rate() -> None:
    assert notes() == []
    assert notes("training.iterations=50") == []


@pytest.mark.parametrize(
    ("changed", "rate"),
    [
        # 24 prompts of 8 in 4 updates at 2e-3: 48 samples an update
        (["training.prompts_per_iteration=96"], "192 samples and the recipe's 48; its rate times sqrt(4) is 0.004"),
        (["training.prompts_per_iteration=6"], "12 samples and the recipe's 48; its rate times sqrt(0.25) is 0.001"),
        (["training.updates_per_iteration=1"], "192 samples and the recipe's 48; its rate times sqrt(4) is 0.004"),
    ],
)
def test_the_rate_follows_the_root_of_the_batch(changed: list[str], rate: str) -> None:
    [line] = notes(*changed)
    assert line.endswith(rate)
    assert notes(*changed, "training.optimizer.learning_rate=1e-3") == []


def test_a_schedule_that_is_stretched_is_named() -> None:
    [line] = notes("training.iterations=440")
    assert "linear is stretched to 4 times" in line
    assert notes("training.iterations=440", "training.optimizer.schedule=constant") == []
