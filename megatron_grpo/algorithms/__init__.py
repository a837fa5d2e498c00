"""The steps of GRPO and PPO, as the driver runs them."""
