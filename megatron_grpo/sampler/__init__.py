"""Sampling from the policy: the interface and the vLLM engines behind it."""
