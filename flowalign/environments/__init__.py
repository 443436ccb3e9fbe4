"""Environments that a language model takes turns with."""

from flowalign.environments.base import Answer, Environment
from flowalign.environments.higher_lower import HigherLower

__all__ = ["Answer", "Environment", "HigherLower"]
