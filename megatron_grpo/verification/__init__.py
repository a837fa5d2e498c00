"""Proof that layouts change only speed and memory: each computes the same tokens, compared with transformers."""
