"""A reward server for tests, in a process of its own: `python served_reward.py PORT [SECONDS]`.

Serves the shapes checker, which takes SECONDS longer for each call, as a bigger model would.
"""

import sys
import time

import torch
import uvicorn

from rewards.server import RewardServer
from rewards.shapes.reward import ShapesReward

PORT, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


class Slow(ShapesReward):
    def __call__(self, samples, prompts, metadata):
        time.sleep(SECONDS)
        return super().__call__(samples, prompts, metadata)


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(RewardServer(Slow()).app, port=PORT, log_level="warning")
