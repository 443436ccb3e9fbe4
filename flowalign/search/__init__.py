"""Better samples at inference, from frozen models: what is tried, scored, pruned and kept within a budget."""

from flowalign.search.engine import Budget, Engine, Particles
from flowalign.search.found import Found, Node, Searches

__all__ = ["Budget", "Engine", "Found", "Node", "Particles", "Searches"]
