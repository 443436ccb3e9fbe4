"""Rewards of a language model's texts. `images` of the reward interface holds the texts."""
