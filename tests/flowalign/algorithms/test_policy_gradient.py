"""What policy gradients over denoising steps and over tokens share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.algorithms.policy_gradient import ActionExperience
from rewards import Scores, Spec
from tests.flowalign.small_run import small_run


class Weighing:
    """Rewards that differ within a group, and a weight for the advantage of every sample."""

    name = "weighing"

    def __init__(self, kind: str, weigh: bool) -> None:
        self.spec, self.weigh = Spec(frozenset({kind, "prompt"})), weigh

    def __call__(self, samples: list[Any], prompts: list[str], metadata: list[dict[str, Any]]) -> Scores:
        count = torch.arange(len(samples))
        return Scores((count % 3).float(), weight=0.25 + 0.5 * (count % 2) if self.weigh else None)


def collected(folder: Path, recipe: str, kind: str, weigh: bool) -> ActionExperience:
    run = small_run(recipe, folder, reward=Weighing(kind, weigh))
    torch.manual_seed(0)
    return run.collect(run.groups.draw(0))


@pytest.mark.parametrize("recipe, kind", [("tiny_sd3/flow_grpo", "image"), ("tiny_lm/grpo", "text")])
def test_a_weight_of_the_scores_acts_on_the_normalised_advantage(recipe: str, kind: str, tmp_path: Path) -> None:
    plain = collected(tmp_path / "plain", recipe, kind, weigh=False)
    weighed = collected(tmp_path / "weighed", recipe, kind, weigh=True)
    assert plain.advantage.any()
    weight = weighed.scores.weight
    assert weight is not None
    torch.testing.assert_close(weighed.advantage, plain.advantage * weight[:, None])
