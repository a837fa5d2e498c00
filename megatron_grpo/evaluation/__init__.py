"""How good a model is on prompts that it was not trained on: estimates with their uncertainty, and comparisons."""
