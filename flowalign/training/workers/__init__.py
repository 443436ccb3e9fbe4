"""Rollout workers: separate processes that sample, and the learner's fleet of them."""
