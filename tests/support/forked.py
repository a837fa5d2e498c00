"""Runs a function in a forked process, also as a user whom file permissions hold back."""

import os
import pickle
from collections.abc import Callable
from typing import Any


def in_fork(function: Callable[[], Any], prepare: Callable[[], None]) -> Any:
    """What a function returns in a forked process after `prepare` ran there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prepare()
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(function(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the function raised"
    return pickle.loads(result)


NOBODY = 65534


def as_ordinary_user(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process without privileges. It must not import anything new there."""
    return in_fork(function, _become_ordinary)


def _become_ordinary() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
