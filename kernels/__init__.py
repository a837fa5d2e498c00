"""Triton kernels with their torch references, imported as megatron_grpo_kernels."""
