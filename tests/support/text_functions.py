"""Functions that run with limits in tests: ordinary ones, and some that take too much."""

import os
import re
import time


class OddError(Exception):
    """An error that cannot be made again of its message alone."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(f"{text} {number}")


def make_state() -> str:
    return "a"


def refuse() -> str:
    raise ValueError("no state")


def concatenate(state: str, second: str, third: str) -> str:
    return state + second + third


def compute(state: str) -> None:
    while True:
        pass


def backtrack(state: str) -> bool:
    return re.fullmatch("(a|a)*b", state * 40) is not None


def become_large(state: str, size: int) -> int:
    return len(state * size)


def sleep(state: str, seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def fail(state: str, text: str) -> None:
    raise ValueError(text)


def fail_oddly(state: str) -> None:
    raise OddError("odd", 3)


def tell_process(state: str) -> int:
    return os.getpid()
