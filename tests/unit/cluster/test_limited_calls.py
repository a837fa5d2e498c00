"""Functions with limits: what is within them answers, what is beyond is ended, and the next call answers again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.config.errors import RunError
from tests.support.text_functions import (
    backtrack,
    become_large,
    compute,
    concatenate,
    fail,
    fail_oddly,
    make_state,
    refuse,
    sleep,
    tell_process,
)


@pytest.fixture(scope="module")
def calls() -> Iterator[LimitedCalls]:
    calls = LimitedCalls(make_state, cpu_s=0.3, memory_mib=200, processes=4)
    yield calls
    calls.close()


def test_a_function_gets_the_state_and_answers(calls: LimitedCalls) -> None:
    assert calls.call(concatenate, "b", "c") == "abc"
    assert asyncio.run(calls.run(concatenate, "b", "c")) == "abc"
    began = time.perf_counter()
    for _ in range(200):
        calls.call(concatenate, "b", "c")
    assert (time.perf_counter() - began) / 200 < 0.02


@pytest.mark.parametrize("function", [compute, backtrack])
def test_a_call_that_computes_too_long_is_ended_also_in_c_code(calls: LimitedCalls, function: Any) -> None:
    began = time.monotonic()
    with pytest.raises(LimitError, match=r"needs more than 0\.3 s of a processor or 200 MiB"):
        asyncio.run(calls.run(function))
    assert time.monotonic() - began < 10
    assert calls.call(concatenate, "b", "c") == "abc"


def test_a_call_that_takes_too_much_memory_fails(calls: LimitedCalls) -> None:
    with pytest.raises(LimitError, match="200 MiB"):
        calls.call(become_large, 3_000_000_000)
    assert calls.call(become_large, 1000) == 1000
    assert calls.call(concatenate, "b", "c") == "abc"


def test_waiting_counts_for_nothing(calls: LimitedCalls) -> None:
    """The limit is processor time, so a busy machine decides nothing."""
    assert calls.call(sleep, 0.8) == "rested"


def test_errors_are_those_of_the_function(calls: LimitedCalls) -> None:
    with pytest.raises(ValueError, match="not this"):
        calls.call(fail, "not this")
    with pytest.raises(RunError, match="OddError: odd"):
        calls.call(fail_oddly)


def test_a_process_that_died_while_idle_is_no_call_beyond_its_limits(calls: LimitedCalls) -> None:
    process = calls.call(tell_process)
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert calls.call(concatenate, "b", "c") == "abc"


def test_ordinary_calls_pass_those_without_end(calls: LimitedCalls) -> None:
    async def flood() -> int:
        endless = [asyncio.create_task(calls.run(compute)) for _ in range(8)]
        await asyncio.sleep(0)
        assert await calls.run(concatenate, "b", "c") == "abc"
        ended = sum(call.done() for call in endless)
        outcomes = await asyncio.gather(*endless, return_exceptions=True)
        assert all(isinstance(outcome, LimitError) for outcome in outcomes)
        return ended

    assert asyncio.run(flood()) <= 4


def test_the_error_of_the_state_is_raised() -> None:
    with pytest.raises(ValueError, match="no state"):
        LimitedCalls(refuse, cpu_s=1)


def test_nothing_stays() -> None:
    calls = LimitedCalls(make_state, cpu_s=1)
    process = calls.call(tell_process)
    calls.close()
    for _ in range(50):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the process is still there")
