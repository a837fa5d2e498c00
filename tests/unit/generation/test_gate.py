"""When requests enter an engine, and when it counts as paused."""

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


async def test_it_runs_while_something_is_in_flight() -> None:
    engine = Scene()
    await engine.gate.wait_paused()
    assert not engine.llm.runs
    await engine.enter(2)
    assert engine.llm.runs
    engine.gate.leave(1)
    await engine.enter(3)
    engine.gate.leave(4)
    await engine.gate.wait_paused()
    assert not engine.llm.runs
    assert engine.told == [2, 1, 4, 0]


async def test_responses_that_were_given_up_may_still_be_on_their_way_out() -> None:
    engine = Scene()
    await engine.enter(2)
    asyncio.get_running_loop().call_later(0.2, engine.gate.leave, 2)
    await engine.gate.wait_paused()
    assert not engine.llm.runs


async def test_responses_that_stay_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_gate, "DRAIN_S", 0.3)
    engine = Scene()
    await engine.enter(2)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="2 responses are in flight"):
        await engine.gate.wait_paused()
    assert time.monotonic() - began >= 0.3
    assert engine.llm.runs


@pytest.mark.parametrize("in_flight", [0, 2])
async def test_nobody_enters_while_weights_change(in_flight: int) -> None:
    engine = Scene()
    if in_flight:
        await engine.enter(in_flight)
    await engine.gate.close("weights", "incomplete")
    await engine.gate.wait_paused()
    late = asyncio.create_task(engine.enter(1))
    await asyncio.sleep(0.05)
    assert not engine.llm.runs
    assert not late.done()
    await engine.gate.open("weights")
    assert engine.llm.runs == bool(in_flight)
    await late
    assert engine.llm.runs
    assert engine.told[-1] == in_flight + 1


@pytest.mark.parametrize("other_requests", [0, 2])
async def test_requests_that_could_not_be_added_are_not_in_flight(other_requests: int) -> None:
    engine = Scene()
    if other_requests:
        await engine.enter(other_requests)
    with pytest.raises(ValueError, match="no such token"):
        async with engine.gate.admission(3):
            raise ValueError("no such token")
    assert engine.told[-1] == other_requests
    engine.gate.leave(other_requests)
    await engine.gate.wait_paused()
    assert not engine.llm.runs


async def test_one_request_runs_while_new_ones_wait_for_the_release() -> None:
    engine = Scene()
    await engine.gate.close("weights", "incomplete")
    waiting = asyncio.create_task(engine.enter(1))
    await engine.gate.wait_paused()
    async with engine.gate.running_scheduler():
        assert engine.llm.runs
        await asyncio.sleep(0.01)
        assert not engine.told, "it waits outside"
    await engine.gate.wait_paused()
    assert not engine.llm.runs, "nothing is in flight"
    await engine.gate.open("weights")
    await waiting
    assert engine.llm.runs


async def test_requests_in_flight_go_on_beside_it_unless_it_fails() -> None:
    engine = Scene()
    await engine.gate.wait_paused()
    await engine.enter(2)
    await engine.gate.close("weights", "incomplete")
    await engine.gate.wait_paused()
    async with engine.gate.running_scheduler():
        pass
    assert engine.llm.runs, "they are not paused twice, which would compute their caches again"
    await engine.gate.open("weights")
    await engine.gate.close("weights", "incomplete")
    await engine.gate.wait_paused()
    with pytest.raises(ValueError, match="other numbers"):
        async with engine.gate.running_scheduler():
            raise ValueError("other numbers")
    await engine.gate.wait_paused()
    assert not engine.llm.runs


@pytest.mark.parametrize(
    ("updates_in_flight", "cause", "is_refused"),
    [(False, "weights", True), (True, "weights", False), (False, "memory", True), (True, "memory", False)],
)
async def test_requests_are_refused_with_the_reason_unless_they_may_wait(
    updates_in_flight: bool, cause: Cause, is_refused: bool
) -> None:
    gate = Gate(Scene().llm, updates_in_flight=updates_in_flight, keeps_cache=False, on_change=lambda _: None)
    await gate.wait_paused()
    await gate.close(cause, "the reason")
    assert gate.is_closed(cause)
    with pytest.raises(RuntimeError, match="the reason") if is_refused else nullcontext():
        gate.require_open()
    await gate.open(cause)
    gate.require_open()


@pytest.mark.parametrize("in_flight", [0, 2])
async def test_requests_wait_until_an_engine_has_both_weights_and_memory(in_flight: int) -> None:
    engine = Scene()
    if in_flight:
        await engine.enter(in_flight)
    await engine.gate.close("memory", "it sleeps")
    await engine.gate.wait_paused()
    late = asyncio.create_task(engine.enter(1))
    for cause in ("weights", "memory"):
        await engine.gate.close("weights", "incomplete")
        await asyncio.sleep(0.02)
        assert not engine.llm.runs
        assert not late.done()
        await engine.gate.open("weights" if cause == "weights" else "memory")
    await asyncio.sleep(0.02)
    assert not engine.llm.runs, "the weights came after the memory, and are not committed"
    assert not late.done()
    await engine.gate.open("weights")
    await late
    assert engine.llm.runs
    assert engine.told[-1] == in_flight + 1


async def test_a_sleeping_engine_stays_closed_when_its_weights_are_committed() -> None:
    gate = Gate(Scene().llm, updates_in_flight=False, keeps_cache=False, on_change=lambda _: None)
    await gate.wait_paused()
    await gate.close("memory", "it sleeps")
    await gate.close("weights", "the weights are incomplete")
    await gate.open("weights")
    with pytest.raises(RuntimeError, match="it sleeps"):
        gate.require_open()
