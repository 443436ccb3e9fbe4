"""Rewards of a language model's texts."""
