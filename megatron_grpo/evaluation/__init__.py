"""Evaluation of a model on held-out prompts: estimates with confidence intervals, and comparisons of two models."""
