"""Benchmarks with fixed, versioned protocols: a short file a suite, one way to run them all."""

from flowalign.evaluation.benchmarks.base import Suite
from flowalign.evaluation.benchmarks.run import Measured, measure

__all__ = ["Measured", "Suite", "measure"]
