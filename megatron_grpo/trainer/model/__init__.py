"""Building a rank's shard with Megatron-Core: layers, attention, heads, log-probabilities."""
