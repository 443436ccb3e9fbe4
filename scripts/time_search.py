"""How long it takes to finish states of different steps, as a search has them, in three ways.

They share network batches, or each batch has the states of one step, or the states are finished one by one.

    OMP_NUM_THREADS=1 python scripts/time_search.py
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: threads that wait sleep
import torch
from torch import Tensor

from flowalign.data import ASSETS
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.search import Engine
from rewards.shapes.reward import ShapesReward

STEPS, EACH, REPEATS = 10, 4, 3


def seconds(made: Callable[[], Tensor]) -> float:
    begin = time.process_time()
    made()
    return time.process_time() - begin


@torch.no_grad()
def main() -> None:
    policy = DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3", encode_options={"max_sequence_length": 0})
    engine = Engine(policy, ShapesReward(), "two red circles", Sampling(steps=STEPS, batch_size=64))
    step = torch.arange(STEPS).repeat_interleave(EACH)
    x = torch.randn(len(step), *engine.start(1).x.shape[1:])

    def finished(size: int) -> Tensor:
        """In groups of so many neighbours."""
        rows = torch.arange(len(step)).split(size)
        return torch.cat([engine.finish(engine.particles(x[own], step[own])).x for own in rows])

    ways = {"shared batches": len(step), "one step a batch": EACH, "one by one": 1}
    ends = {name: finished(size) for name, size in ways.items()}
    for name, size in ways.items():
        torch.testing.assert_close(ends[name], ends["one by one"], atol=1e-4, rtol=0)
        spent = min(seconds(lambda size=size: finished(size)) for _ in range(REPEATS))  # type: ignore[misc]
        print(f"{name}: {spent:.2f} s of processor time for {len(step)} states")


if __name__ == "__main__":
    main()
