"""Weights of models: tables of the families, shards of ranks, Hugging Face files in and out, and refits."""
