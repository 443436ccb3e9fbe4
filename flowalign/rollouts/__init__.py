"""A policy at work among processes: it samples, scores and gathers."""
