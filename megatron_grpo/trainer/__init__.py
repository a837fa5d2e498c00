"""Policy and value model in Megatron-Core: forward passes, optimizer steps and checkpoints, one process per rank."""
