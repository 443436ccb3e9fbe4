"""flowalign: align diffusion and flow models with rewards."""

__version__ = "0.1.0"
