"""The driver's half of models in training: groups of ranks that look like one model."""
