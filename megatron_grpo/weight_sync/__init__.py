"""Refits: moving the policy's weights into the workers of engines, one version at a time."""
