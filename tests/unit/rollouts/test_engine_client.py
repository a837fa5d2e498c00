"""Which engine a group goes to, and how requests travel, with an engine that is an object of this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.config.errors import EngineLostError, SamplingError
from megatron_grpo.rollouts.engine_choice import Engines
from megatron_grpo.rollouts.engine_client import EngineClient, EngineLeftError
from megatron_grpo.rollouts.failures import RolloutFailure
from tests.support.virtual_time import run_at_once

SETTINGS = SamplingSettings(max_new_tokens=4)


def request(seed: int) -> GenerationRequest:
    return GenerationRequest(prompt_ids=np.zeros(1, np.int32), seed=seed, max_new_tokens=4)


def response(seed: int) -> GenerationOutput:
    empty = np.empty(0)
    return GenerationOutput(token_ids=empty, logprobs=empty, text=str(seed), stop_reason="stop", spans=[])


Answer = Callable[[list[int]], list[list[tuple[int, Any]]]]
"""(seeds of a call) -> what it yields, one list after the other; an exception in it is raised."""


def one_by_one(seeds: list[int]) -> list[list[tuple[int, Any]]]:
    return [[(index, response(seed))] for index, seed in reversed(list(enumerate(seeds)))]


class FakeActor:
    """An engine's actor: remembers its calls, and answers what `answer` says, then waits if it is told to."""

    def __init__(self, answer: Answer = one_by_one, *, then_wait: bool = False) -> None:
        self.answer, self.then_wait = answer, then_wait
        self.calls: list[tuple[str, list[int], SamplingSettings]] = []
        self.aborted: list[tuple[str, list[int]]] = []
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._generate))
        self.abort = SimpleNamespace(remote=lambda call, indices: self.aborted.append((call, indices)))

    async def _generate(self, requests: Any, settings: SamplingSettings, call: str) -> AsyncIterator[Any]:
        seeds = [request.seed for request in requests.value]
        self.calls.append((call, seeds, settings))
        for answers in self.answer(seeds):
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if isinstance(answers, Exception):
                future.set_exception(answers)
            else:
                future.set_result(answers)
            yield future
        if self.then_wait:
            await asyncio.sleep(60)


def engines(*loads: int) -> Engines:
    clients = [EngineClient(None, index, "w") for index in range(len(loads))]
    for client, load in zip(clients, loads, strict=True):
        client.load = load
    return Engines(clients)


@pytest.mark.parametrize(
    ("loads", "sizes", "expected"),
    [
        ([0], [8, 8], [0, 0]),
        ([0, 0], [8, 8, 8, 8], [0, 0, 1, 1]),
        ([0, 0], [8, 8, 8], [0, 0, 1]),
        ([0, 0, 0], [4, 4], [0, 2]),
        ([0, 16], [8, 8], [0, 0]),
        ([0, 8], [8, 8, 8], [0, 0, 1]),
        ([3, 2, 2], [1], [1]),
        ([2, 2, 2], [1], [0]),
        ([5, 4, 3], [1], [2]),
        ([0, 0], [1, 1, 1, 1, 12], [0, 0, 0, 0, 1]),
    ],
)
def test_groups_go_whole_to_the_least_loaded_engines(loads: list[int], sizes: list[int], expected: list[int]) -> None:
    pool = engines(*loads)
    placed = [pool.clients.index(client) for client in pool.assign(sizes)]
    assert placed == expected
    added = [sum(size for size, engine in zip(sizes, placed, strict=True) if engine == i) for i in range(len(loads))]
    assert [client.load for client in pool.clients] == [a + b for a, b in zip(loads, added, strict=True)]


def test_no_engine_gets_more_than_a_group_beyond_its_share() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        pool = engines(*rng.integers(0, 30, rng.integers(1, 6)).tolist())
        sizes = [int(rng.integers(1, 9))] * int(rng.integers(1, 30))
        before = max(client.load for client in pool.clients)
        pool.assign(sizes)
        loads = [client.load for client in pool.clients]
        assert max(loads) <= max(before, sum(loads) / len(loads) + sizes[0])


def test_what_is_asked_in_one_moment_is_one_call_in_its_order() -> None:
    async def scene() -> tuple[FakeActor, list[str]]:
        actor = FakeActor()
        client = EngineClient(actor, 0, "w")
        first = await asyncio.gather(*(client.generate(request(seed), SETTINGS) for seed in (5, 3, 9)))
        second = await client.generate(request(1), SETTINGS)
        return actor, [result.text for result in [*first, second]]

    actor, texts = run_at_once(scene())
    assert texts == ["5", "3", "9", "1"]
    assert actor.calls == [("w.0", [5, 3, 9], SETTINGS), ("w.1", [1], SETTINGS)]


def test_requests_with_other_settings_are_another_call() -> None:
    greedy = SamplingSettings(max_new_tokens=4, temperature=0.0)

    async def scene() -> FakeActor:
        actor = FakeActor()
        client = EngineClient(actor, 0, "w")
        requests = [(1, SETTINGS), (2, SETTINGS), (3, greedy)]
        await asyncio.gather(*(client.generate(request(seed), settings) for seed, settings in requests))
        return actor

    assert [(seeds, settings) for _, seeds, settings in run_at_once(scene()).calls] == [
        ([1, 2], SETTINGS),
        ([3], greedy),
    ]


def test_a_request_that_is_given_up_fails_alone() -> None:
    async def scene() -> list[Any]:
        actor = FakeActor(lambda seeds: [[(0, response(seeds[0])), (1, "no memory for it")]])
        client = EngineClient(actor, 0, "w")
        requests = (client.generate(request(seed), SETTINGS) for seed in (1, 2))
        return await asyncio.gather(*requests, return_exceptions=True)

    good, bad = run_at_once(scene())
    assert good.text == "1"
    assert isinstance(bad, RolloutFailure)
    assert str(bad) == "no memory for it"


@pytest.mark.parametrize("answered", [0, 1])
def test_an_engine_that_fails_fails_everybody_who_waits(answered: int) -> None:
    error = RayTaskError("generate", "", RuntimeError("out of order"))

    async def scene() -> list[Any]:
        actor = FakeActor(lambda seeds: [*one_by_one(seeds)[:answered], error])
        client = EngineClient(actor, 3, "w")
        requests = (client.generate(request(seed), SETTINGS) for seed in (1, 2, 3))
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert not client.is_busy
        return results

    results = run_at_once(scene())
    assert [isinstance(result, SamplingError) for result in results] == [True, True, not answered]
    text = "generation: generation engine 3 failed with RuntimeError: out of order"
    assert {str(result)[: len(text)] for result in results if isinstance(result, SamplingError)} == {text}


def test_an_answer_that_makes_no_sense_leaves_nobody_waiting() -> None:
    async def scene() -> Any:
        return await EngineClient(FakeActor(lambda _: [[("no", "index", "at all")]]), 0, "w").generate(
            request(1), SETTINGS
        )

    with pytest.raises(SamplingError, match="generation engine 0 ended a call without an answer"):
        run_at_once(scene())


def test_an_engine_that_forgets_a_request_is_an_error() -> None:
    async def scene() -> Any:
        return await EngineClient(FakeActor(lambda _: []), 0, "w").generate(request(1), SETTINGS)

    with pytest.raises(SamplingError, match="generation engine 0 ended a call without an answer"):
        run_at_once(scene())


def test_who_stops_waiting_is_aborted() -> None:
    async def scene() -> FakeActor:
        actor = FakeActor(lambda seeds: [[(0, response(seeds[0]))]], then_wait=True)
        client = EngineClient(actor, 0, "w")
        tasks = [asyncio.create_task(client.generate(request(seed), SETTINGS)) for seed in (1, 2, 3)]
        await tasks[0]
        late = asyncio.create_task(client.generate(request(4), SETTINGS))
        await asyncio.sleep(0)
        for task in (*tasks[1:], late):  # the last one has not left yet
            task.cancel()
        await asyncio.wait([*tasks[1:], late])
        await asyncio.sleep(0.01)
        assert not client.is_busy
        return actor

    actor = run_at_once(scene())
    assert [seeds for _, seeds, _ in actor.calls] == [[1, 2, 3]]
    assert actor.aborted == [("w.0", [1, 2])]


def test_at_the_deadline_the_late_engines_are_lost_and_named() -> None:
    async def scene() -> Any:
        late = [EngineClient(FakeActor(lambda _: [], then_wait=True), index, "w") for index in (1, 2)]
        pool = Engines([EngineClient(FakeActor(), 0, "w"), *late])
        tasks = [asyncio.create_task(client.generate(request(1), SETTINGS)) for client in pool.clients]
        await tasks[0]
        watching = asyncio.create_task(pool.mark_overdue_lost(0.1))
        losses = await pool.wait_for_losses()
        watching.cancel()
        return losses, await asyncio.gather(*tasks, return_exceptions=True)

    losses, (good, *bad) = run_at_once(scene())
    assert good.text == "1"
    text = "generation: no answer from generation engine 1, generation engine 2 within 0.1 s"
    assert [(isinstance(error, EngineLostError), str(error)[: len(text)]) for error in bad] == [(True, text)] * 2
    assert {number: (loss.restarts, loss.reason[: len(text)]) for number, loss in losses.items()} == {
        1: (0, text),
        2: (0, text),
    }


def test_the_deadline_of_an_engine_that_was_replaced_begins_anew() -> None:
    async def scene() -> tuple[bool, bool]:
        client = EngineClient(FakeActor(lambda _: [], then_wait=True), 0, "w")
        pool = Engines([client])
        watching = asyncio.create_task(pool.mark_overdue_lost(0.4))
        await asyncio.sleep(0.3)
        client.replace(FakeActor(lambda _: [], then_wait=True))
        task = asyncio.create_task(client.generate(request(1), SETTINGS))
        await asyncio.sleep(0.3)
        early = client.loss is not None
        await asyncio.wait([task], timeout=5)
        watching.cancel()
        return early, client.loss is not None

    assert run_at_once(scene()) == (False, True)


@pytest.mark.parametrize("error", [RayActorError(), RayTaskError("generate", "", EngineLostError("a process ended"))])
def test_what_a_lost_engine_has_not_answered_can_be_asked_of_the_next(error: Exception) -> None:
    async def scene() -> Any:
        old, new = FakeActor(lambda seeds: [*one_by_one(seeds)[:1], error]), FakeActor()
        client = EngineClient(old, 0, "w")
        pool = Engines([client])
        tasks = [asyncio.create_task(client.generate(request(seed), SETTINGS)) for seed in (1, 2, 3)]
        losses = await pool.wait_for_losses()
        first = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineLostError):
            await client.generate(request(4), SETTINGS)
        waiting = asyncio.create_task(client.wait_replaced())
        await asyncio.sleep(0)
        assert not waiting.done(), "nobody has taken its place"
        client.replace(new)
        await waiting
        again = await asyncio.gather(*(client.generate(request(seed), SETTINGS) for seed in (1, 2)))
        return losses, first, [result.text for result in again], new.calls, client.restarts

    losses, first, again, calls, restarts = run_at_once(scene())
    assert [isinstance(result, EngineLostError) for result in first] == [True, True, False]
    assert losses[0].reason.startswith("generation: generation engine 0 ")
    assert again == ["1", "2"]
    assert [seeds for _, seeds, _ in calls] == [[1, 2]]
    assert restarts == 1


def test_the_end_of_an_engine_that_was_replaced_before_it_was_noticed_is_no_loss_of_the_next() -> None:
    async def scene() -> Any:
        ends = asyncio.Event()

        class Dying(FakeActor):
            async def _generate(self, requests: Any, settings: SamplingSettings, call: str) -> AsyncIterator[Any]:
                await ends.wait()
                raise RayActorError
                yield

        client = EngineClient(Dying(), 0, "w")
        task = asyncio.create_task(client.generate(request(1), SETTINGS))
        await asyncio.sleep(0.01)
        client.replace(FakeActor())
        ends.set()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.1)
        return answer, client.loss, (await client.generate(request(2), SETTINGS)).text

    answer, loss, text = run_at_once(scene())
    assert isinstance(answer, EngineLostError)
    assert (loss, text) == (None, "2")


def test_an_engine_that_nobody_replaces_fails_everybody_who_needs_it() -> None:
    async def scene() -> Any:
        client = EngineClient(FakeActor(lambda _: [], then_wait=True), 0, "w")
        client.mark_lost("it burns")
        waiting = asyncio.create_task(client.wait_replaced())
        await asyncio.sleep(0)
        client.give_up("it burns; no other")
        return await asyncio.gather(waiting, client.generate(request(1), SETTINGS), return_exceptions=True)

    results = run_at_once(scene())
    assert [(type(result), str(result)) for result in results] == [(SamplingError, "it burns; no other")] * 2


def test_an_engine_that_leaves_gets_no_rollouts_and_is_forgotten_without_any() -> None:
    pool = engines(0, 8, 2)
    pool.clients[0].is_leaving = pool.clients[2].is_leaving = True
    assert [client.number for client in pool.assign([4])] == [1]
    assert [client.number for client in pool.assign([4, 4])] == [1, 1]
    assert pool.forget_idle() == {2: 2}
    assert [client.number for client in pool.clients] == [1, 2]


def test_who_waits_for_an_engine_that_has_left_goes_to_another() -> None:
    async def scene() -> list[Any]:
        client = EngineClient(FakeActor(lambda _: [], then_wait=True), 0, "w")
        pool = Engines([client, EngineClient(FakeActor(), 1, "w")])
        tasks = [asyncio.create_task(client.generate(request(seed), SETTINGS)) for seed in (1, 2)]
        await asyncio.sleep(0.01)
        pool.hand_back(0)
        pool.hand_back(0)  # another process may ask for it too
        outcomes = await asyncio.gather(*tasks, client.generate(request(3), SETTINGS), return_exceptions=True)
        assert await client.is_lost()
        with pytest.raises(EngineLeftError):
            await client.wait_replaced()
        assert [client.number for client in pool.assign([1])] == [1]
        client.mark_lost("its process has ended")  # as its stream reports, later
        assert client.loss is not None
        return [*outcomes, client.loss.reason]

    *outcomes, reason = run_at_once(scene())
    assert [type(outcome) for outcome in outcomes] == [EngineLostError] * 3
    assert reason == "generation engine 0 has left the run"
