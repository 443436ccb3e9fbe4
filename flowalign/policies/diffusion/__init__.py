"""Policies over diffusers pipelines."""
