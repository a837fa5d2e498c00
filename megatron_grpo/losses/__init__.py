"""Pure arithmetic on tensors: losses, advantages, divergences, reward shaping."""
