"""Pure arithmetic on tensors: surrogates, policy and value loss, advantages, KL, corrections, reward shaping."""
