"""The distance of pictures beside a literal one."""

import numpy as np
import pytest
from PIL import Image

from flowalign.evaluation.diversity import diversity
from flowalign.evaluation.scores import Evaluated


def test_diversity_is_the_distance_of_pictures_of_one_prompt() -> None:
    def flat(level: int) -> Image.Image:
        return Image.fromarray(np.full((4, 4, 3), level, np.uint8))

    pictures = [flat(0), flat(51), flat(0), flat(0)]
    result = Evaluated(
        prompts=["a", "a", "b", "b"],
        metadata=[{}] * 4,
        seeds=[0] * 4,
        value=[0.0] * 4,
        parts={},
        samples=pictures,
        rows=[0, 1, 2, 3],
    )
    # 0.2 apart, and not at all
    assert diversity(result) == pytest.approx(0.1)
