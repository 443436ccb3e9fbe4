"""Better samples at inference, from frozen models: what is tried, scored, pruned and kept within a budget."""

from flowalign.search.engine import Budget, Engine, Particles
from flowalign.search.found import Node, Searches, SearchResult

__all__ = ["Budget", "Engine", "Node", "Particles", "SearchResult", "Searches"]
