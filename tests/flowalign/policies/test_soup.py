"""A soup beside several adapters at once, as peft adds them up; shares and fronts beside those by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowalign.errors import ConfigError
from flowalign.policies.base import TRAINED
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.soup import Soup, front, simplex

PROMPTS = ["a red circle", "two blue squares"]


def final(policy: DiffusersPolicy) -> torch.Tensor:
    return policy.sample(PROMPTS, [0, 1], steps=2).trajectory.final


@pytest.fixture
def two(tiny_policy: Callable[..., DiffusersPolicy], tmp_path: Path) -> list[Path]:
    """LoRAs of other ranks, scales and layers."""
    for seed, (rank, alpha, targets) in enumerate(((2, 4, None), (3, 1, ["to_q", "proj_out"]))):
        policy, generator = tiny_policy(), torch.Generator().manual_seed(seed)
        policy.add_lora(rank, alpha, targets)
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        policy.save(tmp_path / str(seed))
    return [tmp_path / "0", tmp_path / "1"]


def test_a_soup_is_the_sum_of_the_adapters(
    two: list[Path], tiny_policy: Callable[..., DiffusersPolicy], tmp_path: Path
) -> None:
    soup, several, again = Soup(tiny_policy(), two), tiny_policy(), tiny_policy()
    for name, path in zip("ab", two, strict=True):
        several.read_lora(path, name)
    base, ends = final(tiny_policy()), []
    for shares in ([1.0, 0.0], [0.0, 1.0], [0.3, 0.7], [1.0, 1.0], [-0.5, 0.5]):
        several.network.set_adapters(["a", "b"], shares)
        soup.serve(shares)
        torch.testing.assert_close(final(soup.policy), final(several))
        ends.append(final(soup.policy))
    assert min((ends[0] - base).abs().max(), (ends[1] - ends[0]).abs().max()) > 0.01
    assert soup.policy.network.peft_config[TRAINED].r == 5
    # what is written is read as any run's LoRA is
    soup.save(tmp_path / "soup", [0.3, 0.7])
    again.load(tmp_path / "soup")
    torch.testing.assert_close(final(again), ends[2])


def test_a_lora_of_another_model_is_refused(two: list[Path], tiny_policy: Callable[..., DiffusersPolicy]) -> None:
    with pytest.raises(ConfigError, match="soup: no LoRA for this model at 'nowhere'"):
        Soup(tiny_policy(), [two[0], Path("nowhere")])


def test_shares_and_fronts() -> None:
    assert simplex(2, 2) == [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    three = simplex(3, 4)
    assert len(three) == len({tuple(row) for row in three}) == 15
    assert all(sum(row) == pytest.approx(1) and min(row) >= 0 for row in three)
    assert front([[1, 0], [0.6, 0.6], [0.5, 0.5], [0, 1], [0.6, 0.6]]) == [0, 1, 3, 4]
    # of three rewards: the third mixture is best in one alone, the last one is beaten by the fourth in all
    assert front([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.4, 0.4, 0.4], [0.3, 0.3, 0.3]]) == [0, 1, 2, 3]
