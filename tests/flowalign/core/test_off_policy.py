"""The weights of actions that another policy drew."""

import math

import torch

from flowalign.core.off_policy import correction

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def test_off_policy_weights_by_loops() -> None:
    old, sampler = -torch.rand(6, 4) * 2, -torch.rand(6, 4) * 2
    token = (old - sampler).exp()
    made = correction(old, sampler, MASK, largest=1.3)
    torch.testing.assert_close(made[MASK], token.clamp(max=1.3)[MASK])
    masked = correction(old, sampler, MASK, rule="mask", largest=1.3, smallest=0.7)
    expected = torch.where((token >= 0.7) & (token <= 1.3), token, 0)
    torch.testing.assert_close(masked[MASK], expected[MASK])
    row = torch.stack([token[b][MASK[b]].prod() for b in range(6)])[:, None]
    torch.testing.assert_close(correction(old, sampler, MASK, level="sequence", largest=1.5), row.clamp(max=1.5))
    assert torch.equal(correction(old, old, MASK), torch.ones(6, 4))
    # infinite weights would take all advantages of 0 for no number
    assert correction(old + 200, old, MASK, level="sequence", largest=math.inf).isfinite().all()
