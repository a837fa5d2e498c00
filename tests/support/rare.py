"""Marking some of a test's cases as slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def rare(cases: Iterable[Any]) -> list[Any]:
    """Cases of `pytest.mark.parametrize`, of one value each, which only `make test-slow` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
