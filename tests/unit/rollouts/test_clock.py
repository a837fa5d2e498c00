"""Deadlines on a clock that stands still while engines sleep."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.engine_choice import Engines
from megatron_grpo.rollouts.engine_client import EngineClient
from tests.support.virtual_time import run_at_once


def run(scene: Coroutine[Any, Any, None]) -> None:
    run_at_once(asyncio.wait_for(scene, 20))


async def count_seconds(clock: RolloutClock, seconds: float) -> float:
    """Wait for a deadline; the seconds of the event loop until it passes."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with clock.timeout(seconds):
            await asyncio.sleep(10)
    return loop.time() - began


@pytest.mark.parametrize("begins_asleep", [False, True])
def test_a_deadline_leaves_out_the_time_asleep(begins_asleep: bool) -> None:
    async def scene() -> None:
        clock = RolloutClock()
        if begins_asleep:
            clock.stop()
        waiting = asyncio.create_task(count_seconds(clock, 0.1))
        await asyncio.sleep(0.02)
        for _ in range(2):  # of two sleeps; the second call of each kind changes nothing
            clock.stop()
            clock.stop()
            before = clock.time()
            await asyncio.sleep(0.15)
            assert clock.time() == before
            assert not waiting.done()
            clock.restart()
            clock.restart()
        assert await waiting == pytest.approx(0.42 if begins_asleep else 0.4)

    run(scene())


def test_an_error_and_a_value_pass_through() -> None:
    async def scene() -> None:
        clock = RolloutClock()
        with pytest.raises(KeyError):
            async with clock.timeout(1):
                raise KeyError
        async with clock.timeout_at(clock.time() + 0.01):
            clock.stop()
            await asyncio.sleep(0.05)
        clock.restart()
        assert await count_seconds(clock, 0.01) == pytest.approx(0.01)

    run(scene())


def test_a_sleeping_engine_is_not_overdue() -> None:
    async def scene() -> None:
        client = EngineClient(None, 0, "worker0")
        engines = Engines([client])
        client._pending.add(asyncio.get_running_loop().create_future())
        engines.clock.stop()
        overdue = asyncio.create_task(engines.mark_overdue_lost(0.05))
        await asyncio.sleep(0.3)
        assert client.loss is None
        engines.clock.restart()
        while client.loss is None:
            await asyncio.sleep(0.05)
        overdue.cancel()

    run(scene())
