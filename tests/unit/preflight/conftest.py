"""Fixtures of the tests of a run's checks."""

from __future__ import annotations

from tests.support.fake_rollouts import fake_ray

__all__ = ["fake_ray"]
