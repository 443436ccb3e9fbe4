"""How processes of one group part; what they do when one is lost is in test_processes.py."""

import time

import pytest
import torch

from flowalign.training.distributed.heartbeat import Heartbeat
from tests.flowalign.training.processes import run_together


def leave_late(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    store = torch.distributed.distributed_c10d._get_default_store()
    heartbeat = Heartbeat(store, rank, 2, patience=3)
    torch.distributed.barrier()
    # of the other process's beats, some come after the first one would have left
    time.sleep(2.0 * rank)
    heartbeat.stop(together=True)


@pytest.mark.slow
def test_the_first_process_leaves_last() -> None:
    run_together(2, leave_late)
