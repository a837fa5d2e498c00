"""Moving the policy's weights into the generation workers, one version at a time."""
