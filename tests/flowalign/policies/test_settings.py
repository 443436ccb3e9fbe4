import pytest

from flowalign.policies.settings import Sampling


@pytest.mark.parametrize(
    ("steps", "sigmas"),
    [
        pytest.param(3, [1.0, 0.6, 0.3], id="as many steps keep the levels"),
        pytest.param(4, None, id="other steps have the scheduler's own"),
    ],
)
def test_steps_that_are_asked_for(steps: int, sigmas: list[float] | None) -> None:
    own = Sampling(steps=3, sigmas=[1.0, 0.6, 0.3])
    asked = own.asked({"steps": steps, "guidance": 3.0})
    assert (asked.steps, asked.sigmas, asked.guidance) == (steps, sigmas, 3.0)
    assert own.asked({}) == own
