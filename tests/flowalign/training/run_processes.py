"""Runs of a few seconds on several processes of this machine's CPU, forked from one that has imported everything.

    python run_processes.py PROCESSES [FOLDER]...

Each folder has a `config.yaml`, and in `launch.yaml` environment variables as a launcher would set them; a folder with
a checkpoint is gone on with.
"""

import os
import socket
import sys
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState, PartialState

from flowalign.config import load
from flowalign.training import Trainer


def work(rank: int, processes: int, port: int, folders: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for folder in map(Path, folders):
        environment = yaml.safe_load((folder / "launch.yaml").read_text())
        os.environ |= environment
        Trainer(load(folder / "config.yaml"), resume=True, progress=False).train()
        for name in environment:
            del os.environ[name]
        AcceleratorState._reset_state()
        PartialState._reset_state()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    processes, folders = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.set_num_threads(1)
    torch.multiprocessing.start_processes(work, (processes, port, folders), nprocs=processes, start_method="fork")
