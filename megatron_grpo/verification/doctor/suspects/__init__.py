"""Explanations of a log-probability gap: each changes the oracle, and predicts the log-probabilities that follow."""
