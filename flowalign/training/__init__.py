"""The training loop shared by all algorithms."""

from flowalign.training.trainer import Trainer

__all__ = ["Trainer"]
