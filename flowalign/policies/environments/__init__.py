"""Environments that a language model takes turns with."""

from flowalign.policies.environments.base import Answer, Environment
from flowalign.policies.environments.higher_lower import HigherLower
from flowalign.policies.environments.imagined import Imagined
from flowalign.policies.environments.tools import Tools
from flowalign.policies.environments.trace import Trace

__all__ = ["Answer", "Environment", "HigherLower", "Imagined", "Tools", "Trace"]
