"""For every line on standard input, a run that goes on in a child forked from this process, which has imported all.

    python train_forks.py CONFIG

Prints the child's process id, and when it has ended its exit code, as subprocess tells it.
"""

import os
import sys

import torch

from flowalign.config import load
from flowalign.training import Trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            Trainer(load(sys.argv[1]), resume=True, progress=False).train()
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
