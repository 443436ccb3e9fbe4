"""Rollout workers: processes of their own that sample, and what the learner does to keep them at work."""
