"""What heeds the policy's uncertainty, number by number."""

import math
import statistics

import pytest
import torch

from flowalign.core.entropy import entropy_modulated, regulating_temperature, uncertain, unlikeliness

TURNS = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, -1, -1], [0, 0, 1, -1, -1, -1], [0, 0, 0, 0, 0, 0]])
"""of tokens, the environment's among them"""


SAID = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0]]).bool()


def test_unlikely_right_answers_keep_their_reward() -> None:
    log_prob = torch.tensor([-1.0, -3, -2, -2, -0.5])
    made = unlikeliness(torch.tensor([1.0, 1, 1, 0, 1]), log_prob, torch.tensor([0, 0, 0, 0, 1]), penalty=0.4)
    assert made.tolist() == pytest.approx([1 - 0.4 * 3 / 4, 1, 1 - 0.4 * 1 / 4, 0, 1])


def test_entropy_modulation_number_by_number() -> None:
    advantage, entropy = torch.tensor([[1.0, 1, 1], [-1, -1, 0]]), torch.tensor([[0.0, 2, 1], [2, 0.5, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    made = entropy_modulated(advantage, entropy, mask, sharpness=1.5, clarity=0.2, clarity_sharpness=0.5)
    level = {(0, 0): 0.0, (0, 1): 1.0, (0, 2): 0.5, (1, 0): 1.0, (1, 1): 0.25}
    mean = statistics.mean(math.exp(-1.5 * h) for h in level.values())
    raw = {
        (b, t): advantage[b, t].item() * math.exp(-1.5 * h) / mean
        + (0.2 * math.exp(-0.5 * level[b, t + 1]) if (b, t + 1) in level else 0)
        for (b, t), h in level.items()
    }
    centre = statistics.mean(raw.values())
    for at, value in raw.items():
        assert made[at].item() == pytest.approx(value - centre, abs=1e-5)
    assert made[1, 2] == 0


def test_entropy_modulation_of_turns_number_by_number() -> None:
    torch.manual_seed(0)
    entropy, advantage = torch.rand(4, 6), torch.tensor([1.0, -0.5, 0.0, 2.0])[:, None].expand(4, 6)
    made = entropy_modulated(advantage, entropy, SAID, sharpness=1.5, clarity=0.2, clarity_sharpness=0.5, turn=TURNS)
    own = {
        (b, k): statistics.mean(entropy[b][SAID[b] & (TURNS[b] == k)].tolist())
        for b in range(4)
        for k in range(int(TURNS[b].max()) + 1)
    }
    low, high = min(own.values()), max(own.values())
    level = {at: (h - low) / (high - low) for at, h in own.items()}
    mean = statistics.mean(math.exp(-1.5 * h) for h in level.values())
    raw = {
        (b, k): advantage[b, 0].item() * math.exp(-1.5 * h) / mean
        + (0.2 * math.exp(-0.5 * level[b, k + 1]) if (b, k + 1) in level else 0)
        for (b, k), h in level.items()
    }
    centre = statistics.mean(raw.values())
    for b in range(4):
        for t in range(6):
            expected = raw[b, int(TURNS[b, t])] - centre if SAID[b, t] else 0.0
            assert made[b, t].item() == pytest.approx(expected, abs=1e-5)


def test_only_the_most_uncertain_actions_are_kept() -> None:
    entropy = torch.arange(20.0).view(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 5:] = False
    kept = uncertain(entropy, mask, 0.2)
    assert kept.nonzero().tolist() == [[1, 2], [1, 3], [1, 4]]
    assert torch.equal(uncertain(entropy, mask, 1.0), mask)


def test_the_temperature_pushes_the_entropy_to_its_target() -> None:
    assert regulating_temperature(0.2, 0.5) > 1 > regulating_temperature(0.8, 0.5)


def test_of_no_actions_none_are_uncertain() -> None:
    assert not uncertain(torch.rand(2, 3), torch.zeros(2, 3, dtype=torch.bool), 0.2).any()
