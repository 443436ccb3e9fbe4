"""Configurations: their sections and settings, and reading them."""

from flowalign.config.diffusion import Config, Evaluation, RolloutSampling
from flowalign.config.language import TextConfig
from flowalign.config.loader import kind_of, load, recipe
from flowalign.config.sections import (
    BaseConfig,
    Data,
    EngineSettings,
    Named,
    Optimizer,
    Training,
    TrainingBudget,
    Watch,
    Weighted,
)
from flowalign.policies.settings import Lora, Model, Sampling
from flowalign.settings import parse

__all__ = [
    "BaseConfig",
    "TrainingBudget",
    "Config",
    "Data",
    "EngineSettings",
    "Evaluation",
    "Lora",
    "Model",
    "Named",
    "Optimizer",
    "RolloutSampling",
    "Sampling",
    "TextConfig",
    "Training",
    "Watch",
    "Weighted",
    "kind_of",
    "load",
    "parse",
    "recipe",
]
