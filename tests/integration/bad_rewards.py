"""Reward functions that fail: in the way that is hardest to see, loudly, and by what they do to others."""

import math
import os
import time
from pathlib import Path

import psutil

from tests.integration.example_rewards import right
from tests.integration.runs import MARK


def not_a_number_for_odd_answers(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer, 0 for a wrong one, NaN where the answer is an odd number."""
    return [
        math.nan if int(digits) % 2 else float(text == digits) for text, digits in zip(completions, answer, strict=True)
    ]


def right_unless_broken(completions: list[str], answer: list[str], broken: list[bool], **_: object) -> list[float]:
    """Fails at the rows that say so."""
    if any(broken):
        raise KeyError("unit")
    return right(completions, answer)


def raises_on_bad(completions: list[str], bad: list[list[str]], **_: object) -> list[float]:
    """Raises as soon as one of the completions is among the bad ones."""
    for text, worst in zip(completions, bad, strict=True):
        if text in worst:
            raise ValueError("cannot judge this")
    return [float(text) for text in completions]


def sleeps_on_bad(completions: list[str], bad: list[list[str]], **_: object) -> list[float]:
    """Sleeps forever over a bad completion."""
    for text, worst in zip(completions, bad, strict=True):
        while text in worst:
            time.sleep(1)
    return [float(text) for text in completions]


def dies_on_bad(completions: list[str], bad: list[list[str]], **_: object) -> list[float]:
    """Ends its process over a bad completion, as a segmentation fault does."""
    for text, worst in zip(completions, bad, strict=True):
        if text in worst:
            os._exit(1)
    return [float(text) for text in completions]


def right_and_then_the_engine_is_gone(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Kills the run's generation engine once a step is scored: as many responses as KILL_AFTER says.

    KILL_AFTER=COUNT:FILE, where the file counts over all workers; without it nothing happens.
    """
    kill_after = os.environ.get("KILL_AFTER")
    if kill_after:
        count, _colon, file = kill_after.partition(":")
        with open(file, "a") as scored:
            scored.write("." * len(completions))
        if Path(file).stat().st_size == int(count):
            _kill_the_engine()
    return right(completions, answer)


def _kill_the_engine() -> None:
    for process in psutil.process_iter():
        try:
            if "VLLM" in process.name() and process.environ().get(MARK) == os.environ[MARK]:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
