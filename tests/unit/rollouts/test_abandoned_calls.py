"""Responses of calls that OpenAI's own client gave up, with its retries, streams and protocols, are not trained on."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from tests.support.asked_endpoint import SETTINGS, SlowEngine
from tests.support.asked_endpoint import model as model  # a fixture

MESSAGES: list[Any] = [{"role": "user", "content": "ab"}]
CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    "chat": lambda client, **options: client.chat.completions.create(model="policy", messages=MESSAGES, **options),
    "completions": lambda client, **options: client.completions.create(model="policy", prompt="ab", **options),
    "responses": lambda client, **options: client.responses.create(model="policy", input="ab", **options),
}


PATIENT_S = 60.0


def play(
    model: str, stuck: range, agent: Callable[[AsyncOpenAI, SlowEngine], Awaitable[Any]]
) -> tuple[Conversation, SlowEngine]:
    """Run an agent in a rollout; returns the conversation as the rollout leaves it.

    Its client waits 0.6 s for the first attempts, as many as are stuck, and for the others as long as it takes.
    """
    attempts = count(1)

    async def wait_longer(request: httpx.Request) -> None:
        if next(attempts) > len(stuck):
            request.extensions["timeout"] = httpx.Timeout(PATIENT_S).as_dict()

    async def scene() -> tuple[Conversation, SlowEngine]:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        engine = SlowEngine(stuck)
        renderer = endpoint.get_renderer("task", PromptFormat())
        talk = Conversation(engine, SETTINGS, renderer, lambda turn: turn, 40)
        with endpoint.open_rollout(talk) as access:
            http_client = httpx.AsyncClient(event_hooks={"request": [wait_longer]})
            client = AsyncOpenAI(
                base_url=access.base_url, api_key=access.token, timeout=0.6, max_retries=2, http_client=http_client
            )
            await agent(client, engine)
        segments = talk.list_segments()  # at once, as a rollout does
        await asyncio.sleep(0.1)
        await endpoint.runner.cleanup()
        assert len(segments) == len(talk.list_segments()) == len(talk.responses)
        return talk, engine

    return asyncio.run(scene())


async def wait_for_calls(engine: SlowEngine, number: int) -> None:
    async with asyncio.timeout(PATIENT_S):
        while engine.calls < number:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("protocol", CALLS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_retries_of_the_client_leave_one_response(model: str, protocol: str, is_streamed: bool) -> None:
    async def agent(client: AsyncOpenAI, _: SlowEngine) -> None:
        answer = await CALLS[protocol](client, stream=is_streamed)
        if is_streamed:
            assert [part async for part in answer]

    talk, engine = play(model, range(2), agent)
    assert (len(talk.responses), engine.calls, engine.cancelled) == (1, 3, 2)
    assert talk.failure is None


@pytest.mark.parametrize("protocol", ["chat", "completions"])
@pytest.mark.parametrize("stuck", [range(64), range(60, 64)])
def test_64_cancelled_choices_leave_no_response(model: str, protocol: str, stuck: range) -> None:
    async def agent(client: AsyncOpenAI, engine: SlowEngine) -> None:
        client = client.with_options(timeout=PATIENT_S)
        call = asyncio.ensure_future(CALLS[protocol](client, n=64))
        await wait_for_calls(engine, 64)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        async with asyncio.timeout(PATIENT_S):
            while engine.cancelled < len(stuck):
                await asyncio.sleep(0.01)
        await CALLS[protocol](client)

    talk, engine = play(model, stuck, agent)
    assert len(talk.responses) == 1
    assert engine.cancelled == len(stuck)


def test_an_agent_that_ends_beside_its_own_call_gets_nothing_of_it(model: str) -> None:
    """Seven of eight choices are complete when the rollout ends, and the agent has none of them."""

    async def agent(client: AsyncOpenAI, engine: SlowEngine) -> None:
        client = client.with_options(timeout=PATIENT_S)
        await CALLS["chat"](client)
        call = asyncio.ensure_future(CALLS["chat"](client, n=8))
        call.add_done_callback(lambda task: task.cancelled() or task.exception())
        await wait_for_calls(engine, 9)
        await asyncio.sleep(0.1)  # for the seven that are answered

    talk, _ = play(model, range(8, 9), agent)
    assert len(talk.responses) == 1


def test_a_client_that_leaves_a_stream_before_its_answer(model: str) -> None:
    async def agent(client: AsyncOpenAI, engine: SlowEngine) -> None:
        for call in CALLS.values():
            with pytest.raises(openai.APITimeoutError):
                await call(client.with_options(max_retries=0), stream=True)
        async with asyncio.timeout(PATIENT_S):
            while engine.cancelled < engine.calls:
                await asyncio.sleep(0.01)

    talk, engine = play(model, range(3), agent)
    assert engine.calls > 0, "the machine is too slow for any call to reach the engine"
    assert talk.responses == []
