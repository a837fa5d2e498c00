"""Work beside the start of processes: errors that come soon come first, and nothing outlives the body."""

import threading
import time
from threading import Event

import pytest

from megatron_grpo.run.lifetime import in_background


def fail(_: Event) -> None:
    raise ValueError("damaged")


def fail_late(stop: Event) -> None:
    stop.wait(0.2)
    raise ValueError("damaged")


def until_stopped(stop: Event) -> bool:
    return stop.wait(60)


def test_a_result_that_comes_late_is_there_when_it_is_asked_for() -> None:
    with in_background(lambda stop: stop.wait(0.2), wait_s=0.0) as future:
        assert not future.done()
        assert future.result() is False


def test_what_fails_soon_fails_before_the_body() -> None:
    entered = False
    with pytest.raises(ValueError, match="damaged"), in_background(fail):
        entered = True
    assert not entered


def test_what_fails_late_fails_where_the_result_is_asked_for() -> None:
    with in_background(fail_late, wait_s=0.0) as future, pytest.raises(ValueError, match="damaged"):
        future.result()


def test_the_end_of_the_body_ends_the_work() -> None:
    began, threads = time.monotonic(), threading.active_count()
    with pytest.raises(KeyboardInterrupt), in_background(until_stopped, wait_s=0.0):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
    assert threading.active_count() == threads
