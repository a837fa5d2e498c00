"""When requests enter an engine, and when it counts as paused."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_grpo.generation import gate as engine_gate
from megatron_grpo.generation.gate import Cause, Gate


class PausableLLM:
    """vLLM as far as pausing goes."""

    errored = False

    def __init__(self) -> None:
        self.runs = True

    async def pause_generation(self, **_: Any) -> None:
        self.runs = False

    async def resume_generation(self) -> None:
        self.runs = True


class Scene:
    """An engine and its gate."""

    def __init__(self) -> None:
        self.llm: Any = PausableLLM()
        self.told: list[int] = []
        self.gate = Gate(self.llm, updates_in_flight=True, keeps_cache=False, on_change=self.told.append)

    async def enter(self, requests: int) -> None:
        """Add so many requests."""
        alone = not self.told or not self.told[-1]
        async with self.gate.admission(requests):
            assert self.llm.runs != alone, "a scheduler that is idle sees all of them before it takes the first"


def test_it_runs_while_something_is_in_flight() -> None:
    async def scene() -> None:
        one = Scene()
        await one.gate.wait_paused()
        assert not one.llm.runs
        await one.enter(2)
        assert one.llm.runs
        one.gate.leave(1)
        await one.enter(3)
        one.gate.leave(4)
        await one.gate.wait_paused()
        assert not one.llm.runs
        assert one.told == [2, 1, 4, 0]

    asyncio.run(scene())


def test_responses_that_were_given_up_may_still_be_on_their_way_out() -> None:
    async def scene() -> None:
        one = Scene()
        await one.enter(2)
        asyncio.get_running_loop().call_later(0.2, one.gate.leave, 2)
        await one.gate.wait_paused()
        assert not one.llm.runs

    asyncio.run(scene())


def test_responses_that_stay_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        one = Scene()
        await one.enter(2)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="2 responses are in flight"):
            await one.gate.wait_paused()
        assert time.monotonic() - began >= 0.3
        assert one.llm.runs

    monkeypatch.setattr(engine_gate, "DRAIN_S", 0.3)
    asyncio.run(scene())


@pytest.mark.parametrize("in_flight", [0, 2])
def test_nobody_enters_while_weights_change(in_flight: int) -> None:
    async def scene() -> None:
        one = Scene()
        if in_flight:
            await one.enter(in_flight)
        await one.gate.close("weights", "incomplete")
        await one.gate.wait_paused()
        late = asyncio.create_task(one.enter(1))
        await asyncio.sleep(0.05)
        assert not one.llm.runs
        assert not late.done()
        await one.gate.open("weights")
        assert one.llm.runs == bool(in_flight)
        await late
        assert one.llm.runs
        assert one.told[-1] == in_flight + 1

    asyncio.run(scene())


@pytest.mark.parametrize("others", [0, 2])
def test_requests_that_could_not_be_added_are_not_in_flight(others: int) -> None:
    async def scene() -> None:
        one = Scene()
        if others:
            await one.enter(others)
        with pytest.raises(ValueError, match="no such token"):
            async with one.gate.admission(3):
                raise ValueError("no such token")
        assert one.told[-1] == others
        one.gate.leave(others)
        await one.gate.wait_paused()
        assert not one.llm.runs

    asyncio.run(scene())


def test_one_request_runs_while_new_ones_wait_for_the_release() -> None:
    async def scene() -> None:
        one = Scene()
        await one.gate.close("weights", "incomplete")
        waiting = asyncio.create_task(one.enter(1))
        await one.gate.wait_paused()
        async with one.gate.running_scheduler():
            assert one.llm.runs
            await asyncio.sleep(0.01)
            assert not one.told, "it waits outside"
        await one.gate.wait_paused()
        assert not one.llm.runs, "nothing is in flight"
        await one.gate.open("weights")
        await waiting
        assert one.llm.runs

    asyncio.run(scene())


def test_requests_in_flight_go_on_beside_it_unless_it_fails() -> None:
    async def scene() -> None:
        one = Scene()
        await one.gate.wait_paused()
        await one.enter(2)
        await one.gate.close("weights", "incomplete")
        await one.gate.wait_paused()
        async with one.gate.running_scheduler():
            pass
        assert one.llm.runs, "they are not paused twice, which would compute their caches again"
        await one.gate.open("weights")
        await one.gate.close("weights", "incomplete")
        await one.gate.wait_paused()
        with pytest.raises(ValueError, match="other numbers"):
            async with one.gate.running_scheduler():
                raise ValueError("other numbers")
        await one.gate.wait_paused()
        assert not one.llm.runs

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("updates_in_flight", "cause", "is_refused"),
    [(False, "weights", True), (True, "weights", False), (False, "memory", True), (True, "memory", False)],
)
def test_requests_are_refused_with_the_reason_unless_they_may_wait(
    updates_in_flight: bool, cause: Cause, is_refused: bool
) -> None:
    async def scene() -> None:
        gate = Gate(Scene().llm, updates_in_flight=updates_in_flight, keeps_cache=False, on_change=lambda _: None)
        await gate.wait_paused()
        await gate.close(cause, "the reason")
        assert gate.is_closed(cause)
        with pytest.raises(RuntimeError, match="the reason") if is_refused else nullcontext():
            gate.require_open()
        await gate.open(cause)
        gate.require_open()

    asyncio.run(scene())


@pytest.mark.parametrize("in_flight", [0, 2])
def test_requests_wait_until_an_engine_has_both_weights_and_memory(in_flight: int) -> None:
    async def scene() -> None:
        one = Scene()
        if in_flight:
            await one.enter(in_flight)
        await one.gate.close("memory", "it sleeps")
        await one.gate.wait_paused()
        late = asyncio.create_task(one.enter(1))
        for cause in ("weights", "memory"):
            await one.gate.close("weights", "incomplete")
            await asyncio.sleep(0.02)
            assert not one.llm.runs
            assert not late.done()
            await one.gate.open("weights" if cause == "weights" else "memory")
        await asyncio.sleep(0.02)
        assert not one.llm.runs, "the weights came after the memory, and are not committed"
        assert not late.done()
        await one.gate.open("weights")
        await late
        assert one.llm.runs
        assert one.told[-1] == in_flight + 1

    asyncio.run(scene())


def test_a_sleeping_engine_stays_closed_when_its_weights_are_committed() -> None:
    async def scene() -> None:
        gate = Gate(Scene().llm, updates_in_flight=False, keeps_cache=False, on_change=lambda _: None)
        await gate.wait_paused()
        await gate.close("memory", "it sleeps")
        await gate.close("weights", "the weights are incomplete")
        await gate.open("weights")
        with pytest.raises(RuntimeError, match="it sleeps"):
            gate.require_open()

    asyncio.run(scene())
