"""Environments score what the model wrote."""
