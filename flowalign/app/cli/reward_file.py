"""The file that the commands about rewards read."""

from pathlib import Path

from pydantic import Field

from flowalign.config.loader import read as read_config
from flowalign.config.sections import Weighted
from flowalign.settings import Section, parse


class Serving(Section):
    """The `server` section."""

    host: str = "127.0.0.1"
    port: int = Field(8300, ge=1, le=65535)
    merge: int = Field(0, ge=0)
    """Most samples of waiting requests that are joined into one call; only for pointwise rewards."""
    queue: int = Field(64, ge=1)
    """Requests that may wait; further ones are refused and must try again."""
    token_variable: str | None = None
    """Environment variable with the token that clients must send; needed beyond loopback."""
    memory: int = Field(384, ge=1)
    """Most megabytes of the requests at work, with their decoded pictures."""
    timeout: float = Field(600.0, gt=0)
    """Most seconds of a call of the reward, and of receiving a request."""
    tf32: bool = True
    """Whether float32 products on NVIDIA GPUs round their factors to 10 bits: several times faster."""


class RewardFile(Section):
    """File of the reward commands: `rewards` as in a training configuration, and `server`."""

    rewards: list[Weighted] = Field(min_length=1)
    server: Serving = Serving()


def read(path: Path) -> RewardFile:
    """The rewards of a file; of a training configuration, only its `rewards` and `server` are read."""
    values = read_config(path)
    if "model" in values:
        values = {key: values[key] for key in ("rewards", "server") if key in values}
    settings: RewardFile = parse(RewardFile, values)
    return settings
