"""Version of the code, which a run records; a checkout has it without being installed."""

__version__ = "0.1.0"
