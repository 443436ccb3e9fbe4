"""Rewards and judges learnt from preferences."""
