"""When an engine counts as paused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from megatron_grpo.generation import pauses as vllm_pauses
from megatron_grpo.generation.pauses import Pauses


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
    """An engine and its pauses."""

    def __init__(self) -> None:
        self.llm: Any = PausableLLM()
        self.told: list[int] = []
        self.pauses = Pauses(self.llm, keeps_cache=False, tell=self.told.append)

    async def enter(self, requests: int) -> None:
        """Add so many requests."""
        alone = not self.told or not self.told[-1]
        async with self.pauses.entering(requests):
            assert self.llm.runs != alone, "a scheduler that is idle sees all of them before it takes the first"


def test_it_runs_while_something_is_in_flight() -> None:
    async def scene() -> None:
        one = Scene()
        await one.pauses.paused()
        assert not one.llm.runs
        await one.enter(2)
        assert one.llm.runs
        one.pauses.left(1)
        await one.enter(3)
        one.pauses.left(4)
        await one.pauses.paused()
        assert not one.llm.runs
        assert one.told == [2, 1, 4, 0]

    asyncio.run(scene())


def test_responses_that_were_given_up_may_still_be_on_their_way_out() -> None:
    async def scene() -> None:
        one = Scene()
        await one.enter(2)
        asyncio.get_running_loop().call_later(0.2, one.pauses.left, 2)
        await one.pauses.paused()
        assert not one.llm.runs

    asyncio.run(scene())


def test_responses_that_stay_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        one = Scene()
        await one.enter(2)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="2 responses are in flight"):
            await one.pauses.paused()
        assert time.monotonic() - began >= 0.3
        assert one.llm.runs

    monkeypatch.setattr(vllm_pauses, "LEAVE_S", 0.3)
    asyncio.run(scene())


@pytest.mark.parametrize("in_flight", [0, 2])
def test_nobody_enters_while_weights_change(in_flight: int) -> None:
    async def scene() -> None:
        one = Scene()
        if in_flight:
            await one.enter(in_flight)
        await one.pauses.hold()
        await one.pauses.paused()
        late = asyncio.create_task(one.enter(1))
        await asyncio.sleep(0.05)
        assert not one.llm.runs
        assert not late.done()
        await one.pauses.release()
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
            async with one.pauses.entering(3):
                raise ValueError("no such token")
        assert one.told[-1] == others
        one.pauses.left(others)
        await one.pauses.paused()
        assert not one.llm.runs

    asyncio.run(scene())


def test_one_request_runs_while_new_ones_wait_for_the_release() -> None:
    async def scene() -> None:
        one = Scene()
        await one.pauses.hold()
        waiting = asyncio.create_task(one.enter(1))
        await one.pauses.paused()
        async with one.pauses.lifted():
            assert one.llm.runs
            await asyncio.sleep(0.01)
            assert not one.told, "it waits outside"
        await one.pauses.paused()
        assert not one.llm.runs, "nothing is in flight"
        await one.pauses.release()
        await waiting
        assert one.llm.runs

    asyncio.run(scene())


def test_requests_in_flight_go_on_beside_it_unless_it_fails() -> None:
    async def scene() -> None:
        one = Scene()
        await one.pauses.paused()
        await one.enter(2)
        await one.pauses.hold()
        await one.pauses.paused()
        async with one.pauses.lifted():
            pass
        assert one.llm.runs, "they are not paused twice, which would compute their caches again"
        await one.pauses.release()
        await one.pauses.hold()
        await one.pauses.paused()
        with pytest.raises(ValueError, match="other numbers"):
            async with one.pauses.lifted():
                raise ValueError("other numbers")
        await one.pauses.paused()
        assert not one.llm.runs

    asyncio.run(scene())
