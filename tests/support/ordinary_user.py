"""Runs a function as a user whom file permissions hold back, as they do not hold back root."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.support.forked import in_fork

NOBODY = 65534


def as_ordinary_user(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process without privileges. It must not import anything new there."""
    return in_fork(function, _become_ordinary)


def _become_ordinary() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
