"""Building a rank's shard with Megatron-Core: layers, attention, experts, adapters, rounding, heads."""
