"""A random part of the items, weighted by 1 / p."""

import pytest
import torch

from flowalign.core.subsampling import inclusion, subsample

SIZE = torch.tensor([0.0, 0.1, 0.4, 0.5, 1.0, 2.0, 0.0, 3.0])


@pytest.mark.parametrize("by_size", [0.0, 0.5])
@pytest.mark.parametrize("share", [0.25, 0.6])
def test_each_weight_is_one_on_average(share: float, by_size: float) -> None:
    probability = inclusion(SIZE, share, by_size)
    draws = torch.stack([subsample(probability, torch.Generator().manual_seed(seed)) for seed in range(8000)])
    # four standard errors
    error = 4 * ((1 - probability) / probability / len(draws)).sqrt() + 1e-6
    assert (draws.mean(0) - 1).abs().le(error).all()
    expected = probability.sum()
    kept = draws.count_nonzero(1)
    assert set(kept.tolist()) <= {int(expected), int(expected) + 1}
    assert draws[draws > 0].min() >= 1
    # the part that is alike for all bounds the weights
    assert draws.max() <= 1 / (share * (1 - by_size)) + 1e-5


def test_probabilities_follow_the_sizes_up_to_one() -> None:
    torch.testing.assert_close(inclusion(torch.tensor([1.0, 3.0]), 0.5, 0.5), torch.tensor([0.375, 0.625]))
    assert inclusion(SIZE, 0.9, 0.5).max() == 1
    torch.testing.assert_close(inclusion(torch.zeros(3), 0.5, 0.5), torch.full((3,), 0.5))
