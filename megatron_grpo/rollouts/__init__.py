"""From prompts to scored trajectories."""
