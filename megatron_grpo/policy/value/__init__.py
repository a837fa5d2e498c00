"""The value model of PPO: the policy's backbone with a head that outputs one number per token."""
