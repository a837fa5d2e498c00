"""The Megatron-Core policy: model build, log-probabilities, optimizer steps and checkpoints, one process per rank."""
