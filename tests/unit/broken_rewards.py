"""A module of reward functions that fails while it is imported."""

reward = 1 / 0
