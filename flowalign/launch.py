"""From a name on the command line to a policy."""

import os
from pathlib import Path

from flowalign.config import Config, Sampling, load
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies import DiffusersPolicy


def world_size() -> int:
    """Number of processes this one was launched with."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def load_for_sampling(
    model: str, lora: Path | None, dtype: str, trained: bool = True
) -> tuple[DiffusersPolicy, Sampling]:
    """A policy ready to sample, and the settings to sample it with.

    Args:
        model: a run's folder, a pipeline's folder, a hub name, or a shipped model.
        lora: folder with LoRA weights.
        trained: with a run's folder, put on what the run trained.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, sampling, encode = Path(model), Sampling(), {}
    weights = lora
    if (folder / "config.yaml").is_file():
        config: Config = load(folder / "config.yaml")
        model, dtype, encode, sampling = (
            config.model.path,
            config.model.dtype,
            config.model.encode,
            config.evaluation,
        )
        if trained and weights is None:
            weights = trained_weights(folder)
    path = ASSETS / model if (ASSETS / model).is_dir() else model
    policy = DiffusersPolicy.from_pretrained(path, dtype, device, encode)
    if weights is not None:
        policy.load(weights)
    return policy, sampling


def trained_weights(run: Path) -> Path:
    """Where a run's newest trained weights are: the finished export, else the newest checkpoint."""
    candidates = [
        run / "lora",
        run / "model",
        *sorted((run / "checkpoints").glob("checkpoint-*"), reverse=True),
    ]
    for folder in candidates:
        if (folder / "pytorch_lora_weights.safetensors").is_file() or (folder / "transformer").is_dir():
            return folder
    raise ConfigError(f"{run} holds no trained weights yet")
