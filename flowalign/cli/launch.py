"""From a name on the command line to a policy."""

from pathlib import Path
from typing import Any

from flowalign.config import load
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.base import Policy
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling, SamplingSettings
from flowalign.training.building import build_policy


def load_for_sampling(
    model: str, lora: Path | None, dtype: str, trained: bool = True
) -> tuple[Policy[Any], SamplingSettings]:
    """A policy ready to sample, and the section of a configuration that says how.

    Args:
        model: a run's folder, a pipeline's folder, a hub name, or a shipped model. A language model: a run's folder.
        lora: folder with LoRA weights.
        trained: with a run's folder, put on what the run trained.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, weights = Path(model), lora
    if (folder / "config.yaml").is_file():
        config = load(folder / "config.yaml")
        policy: Policy[Any] = build_policy(config, device)
        sampling: SamplingSettings = config.evaluation
        if trained and weights is None:
            weights = trained_weights(folder)
    else:
        policy, sampling = DiffusersPolicy.from_pretrained(shipped(model), dtype, device), Sampling()
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
    # of a pipeline: LoRA, denoiser; of a language model: LoRA, all weights
    marks = ("pytorch_lora_weights.safetensors", "transformer", "unet", "adapter_config.json", "config.json")
    for folder in candidates:
        if any((folder / mark).exists() for mark in marks):
            return folder
    raise ConfigError(f"{run} holds no trained weights yet")
