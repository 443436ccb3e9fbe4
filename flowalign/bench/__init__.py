"""Benchmarks with fixed, versioned protocols: a short file a suite, one way to run them all."""

from flowalign.bench.base import Suite
from flowalign.bench.run import Measured, measure

__all__ = ["Measured", "Suite", "measure"]
