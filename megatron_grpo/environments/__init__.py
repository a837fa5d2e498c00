"""Environments answer the model and score its responses."""
