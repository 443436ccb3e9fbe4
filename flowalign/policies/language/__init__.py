"""Policies over transformers language models."""
