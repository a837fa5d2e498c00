"""Sampling from the policy: vLLM engines, rollout workers and their rollouts, and the endpoint for agents."""
