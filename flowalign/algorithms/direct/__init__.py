"""Algorithms that learn by the gradient of a reward through the sampling."""
