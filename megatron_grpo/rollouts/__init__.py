"""The rollout workers' process and the driver's handle of it: prompts in, scored groups of trajectories out."""
