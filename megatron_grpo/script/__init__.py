"""What scripts give to `megatron_grpo.train`, checked and written as a command line has it."""
