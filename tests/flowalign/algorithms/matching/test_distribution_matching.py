"""Distribution matching where everything is Gaussian, and the gradient of the divergence is known."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.matching.distribution import DistributionExperience
from flowalign.policies.diffusion import CleanSamples, Noised

VARIANCE = 0.6
"""of the teacher's data"""


class Linear:
    """Networks whose velocity is a multiple of the state: the generator's, its score's and the teacher's."""

    def __init__(self, **slopes: Tensor) -> None:
        self.slopes, self.asked = slopes, "generator"

    @contextmanager
    def snapshot(self, name: str) -> Iterator[None]:
        self.asked = name
        yield
        self.asked = "generator"

    def reference(self) -> AbstractContextManager[None]:
        return self.snapshot("teacher")

    def velocity_of(self, clean: CleanSamples, noised: Noised) -> Tensor:
        return self.slopes[self.asked] * noised.x


class OneStep(DistributionExperience):
    """One sample after one step of the generator."""

    def __init__(self, state: Noised, at: Noised, sigmas: Tensor) -> None:
        self.state, self.at = state, at
        self.guided = self.clean = self.generator = CleanSamples(
            x0=state.x0, conditions=None, sigmas=sigmas, guidance=(1.0,), error_weights=sigmas
        )

    def states(self, items: Tensor) -> Noised:
        return self.state

    def noised(self, items: Tensor) -> Noised:
        return self.at


def gradients(name: str, gain: float, s: float, after: float, t: float, **settings: str) -> tuple[float, float]:
    """In the generator's gain, of the method's loss up to its known positive factors, and of the divergence.

    The generator predicts x0 = gain * x from x ~ N(0, 1) at level s, steps to the level `after`, and is judged at t.
    """
    method = registry.resolve("algorithms", name)
    algorithm = method(method.Settings(**settings))
    drawn = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # moments of the sample are the distribution's, so that nothing below is an estimate
    x, noise = torch.linalg.solve_triangular(torch.linalg.cholesky(drawn @ drawn.T / 2000), drawn, upper=False)
    row, level, weight = torch.tensor([0]), torch.tensor([1]), torch.ones(1)
    learned = torch.tensor(gain, dtype=torch.float64, requires_grad=True)
    state = Noised(
        x0=(gain * x)[None],
        noise=(x / s - gain * x * (1 - s) / s)[None],
        sigma=torch.tensor([s]),
        samples=row,
        level_index=row,
        error_weight=weight,
    )
    at = Noised(
        x0=state.x0, noise=noise[None], sigma=torch.tensor([t]), samples=row, level_index=level, error_weight=weight
    )
    sigmas = torch.tensor([s] if after == 0 else [s, after])
    experience = OneStep(state, at, sigmas)
    of_teacher = (1 - t) ** 2 * VARIANCE + t**2
    fake = torch.zeros((), dtype=torch.float64, requires_grad=True)
    slopes = {"generator": (1 - learned) / s, "teacher": torch.tensor((1 - (1 - t) * VARIANCE / of_teacher) / t)}
    policy, items = Linear(fake=fake, **slopes), torch.tensor([[0, 0]])
    # the best `fake` there is: its loss is quadratic
    with policy.snapshot("fake"):
        loss, _ = algorithm.role_losses("fake", policy, experience, items)
    (slope,) = torch.autograd.grad(loss.sum(), fake, create_graph=True)
    policy.slopes["fake"] = -slope.detach() / torch.autograd.grad(slope, fake)[0]
    loss, _ = algorithm.losses(policy, experience, items)
    (made,) = torch.autograd.grad(loss.sum(), learned)
    # what is judged is kept * x + noise, with kept = of_state + of_x0 * gain
    of_x0 = (1 - t) if name == "dmd2" else (1 - t) / (1 - after) * (1 - after / s)
    of_state = 0 if name == "dmd2" else (1 - t) / (1 - after) * after / s
    kept, noised = of_state + of_x0 * gain, algorithm.diffused(experience, items, state, state.x0)
    variance = float(noised.x.square().mean())
    teacher = noised.x - t * slopes["teacher"] * noised.x
    divergence = (1 / of_teacher - 1 / variance) * kept * of_x0
    return float(made * (state.x0 - teacher).abs().mean() / 2 * of_x0 * (1 - t) / t**2), divergence


@pytest.mark.parametrize("gain", [0.2, 0.6, 1.1])
@pytest.mark.parametrize(("s", "after", "t"), [(1.0, 0.75, 0.9), (0.6, 0.3, 0.5), (0.5, 0.0, 0.4)])
def test_the_gradient_is_the_divergences(s: float, after: float, t: float, gain: float) -> None:
    for name, settings in (("dmd2", {}), ("tdm", {"fake_learns": "state"})):
        made, wanted = gradients(name, gain, s, after, t, **settings)
        assert made == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    # as published: at the last step alone
    made, wanted = gradients("tdm", gain, s, after, t)
    assert (made == pytest.approx(wanted, rel=1e-4, abs=1e-6)) == (after == 0)
