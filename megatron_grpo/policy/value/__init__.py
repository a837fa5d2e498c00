"""The value model of PPO: the policy's backbone with a head that says one number of each token, behind one object."""
