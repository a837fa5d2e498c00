"""Fixtures of the tests of what surrounds the steps."""

from tests.support.fake_rollouts import fake_ray

__all__ = ["fake_ray"]
