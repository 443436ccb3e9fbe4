"""Rewards that were trained on what noisy states promise, a noise level each."""

import json
from pathlib import Path

from flowalign.errors import ConfigError
from flowalign.runs.foreign import inside
from rewards import Reward
from rewards.clip import PickScore

REPORT = "noisy.json"


class NoisyReward:
    """The rewards in a folder that `flowalign train-reward PROMPTS --noisy MODEL` made.

    Args:
        folder: with a model of each level.

    Raises:
        ConfigError: it is none of these.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            levels = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))["levels"]
        except OSError as error:
            raise ConfigError(
                f"{folder} is no reward of noisy states; flowalign train-reward PROMPTS --noisy MODEL --out {folder} "
                "makes one"
            ) from error
        self.levels = {level["sigma"]: inside(self.folder, level["folder"]) for level in levels}

    def at(self, sigma: float) -> Reward:
        """The reward of the trained level that is nearest."""
        nearest = min(self.levels, key=lambda level: abs(level - sigma))
        # its model is loaded once
        return PickScore(str(self.levels[nearest]), None)
