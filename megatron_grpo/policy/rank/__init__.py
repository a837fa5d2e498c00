"""A rank's half of models in training: its shard, optimizer and checkpoint, inside a Ray actor."""
