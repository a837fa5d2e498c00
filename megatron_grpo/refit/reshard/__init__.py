"""Refit shard to shard: each rank of an engine gets the slices that it keeps, from the ranks that have them."""
