"""Refit by broadcast: every generation worker gets whole tensors and keeps its share."""
