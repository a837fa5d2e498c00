"""Calls that one rollout floods its worker with: bodies that never come, loops of calls, streams that are left."""

import asyncio
import gzip
import json
import time
import zlib
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.rollouts.conversation import OPEN_CALLS, Conversation
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from tests.support.asked_endpoint import SETTINGS, Engine, ask, head
from tests.support.asked_endpoint import model as model  # a fixture
from tests.support.direct_conversation import DirectConversation


def test_bodies_that_never_come_are_bounded(model: str) -> None:
    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> list[bytes]:
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        key = f"Authorization: Bearer {access.token}"
        opened = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(OPEN_CALLS + 6)]
        for _, writer in opened:
            writer.write(head(path, key, length=100))
        waiting = [asyncio.create_task(reader.readline()) for reader, _ in opened]
        async with asyncio.timeout(60):
            while sum(task.done() for task in waiting) < 6:
                await asyncio.sleep(0.01)
        finished, pending = await asyncio.wait(waiting, timeout=0.5)
        for task in pending:
            task.cancel()
        for _, writer in opened:
            writer.close()
        return [task.result() for task in finished]

    lines = ask(model, agent)
    assert [line.split()[1] for line in lines] == [b"429"] * 6


def test_responses_of_a_rollout_are_read_one_at_a_time(model: str) -> None:
    async def scene() -> int:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        talk = Conversation(Engine(), SETTINGS, endpoint.get_renderer("task", PromptFormat()), lambda turn: turn, 40)
        reading, peak = 0, 0

        async def read(output: GenerationOutput, text: str, number: int) -> dict[str, Any]:
            nonlocal reading, peak
            reading += 1
            peak = max(peak, reading)
            await asyncio.sleep(0.01)
            reading -= 1
            return {"role": "assistant", "content": text}

        await asyncio.gather(*(talk.chat([{"role": "user", "content": "ab"}], read=read) for _ in range(8)))
        await endpoint.runner.cleanup()
        return peak

    assert asyncio.run(scene()) == 1


class LongEngine(Engine):
    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        tokens = 20_000
        ids, logprobs = np.full(tokens, 3, dtype=np.int32), np.full(tokens, -0.25, dtype=np.float32)
        return GenerationOutput(
            token_ids=ids, logprobs=logprobs, text="d" * tokens, stop_reason="stop", spans=[Span(0, tokens, 1)]
        )


def test_a_stream_that_is_left_in_the_middle_counts(model: str) -> None:
    """A stream that the agent leaves counts: its beginning may have been all that the agent wanted."""

    async def scene() -> int:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        renderer = endpoint.get_renderer("task", PromptFormat())
        talk = Conversation(LongEngine(), SETTINGS, renderer, lambda turn: turn, 50_000)
        with endpoint.open_rollout(talk) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key=access.token, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": "ab"}]
            stream = await client.chat.completions.create(
                model="policy", messages=messages, n=8, stream=True, logprobs=True
            )
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(60):
                while len(talk.responses) < 8:
                    await asyncio.sleep(0.01)
        await endpoint.runner.cleanup()
        return len(talk.responses)

    assert asyncio.run(scene()) == 8


async def post(url: str, body: bytes, **headers: str) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer right", **headers}
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_calls_are_no_larger_than_others(model: str, coding: str, compress: Any) -> None:
    body = compress(b" " * 100_000_000)

    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> tuple[int, str]:
        return await post(f"{access.base_url}/chat/completions", body, **{"Content-Encoding": coding})

    began = time.process_time()
    status, text = ask(model, agent)
    assert (status, "the request has more than 68096 bytes" in text) == (400, True)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("value", ["[]", "{}", "0", '{"a":0}', '[[],""]'])
def test_calls_of_very_many_values_are_refused(model: str, value: str) -> None:
    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> list[tuple[int, str]]:
        bodies = []
        for values in (1000, 6000):
            metadata = {"a": json.loads(f"[{','.join([value] * values)}]")}
            call = {"messages": [{"role": "user", "content": "ab"}], "metadata": metadata}
            bodies.append(json.dumps(call).encode())
        return [await post(f"{access.base_url}/chat/completions", body) for body in bodies]

    (few, _), (many, text) = ask(model, agent)
    assert (few, many) == (200, 400)
    assert "more than 4256 values" in text


def test_the_texts_of_a_long_answer_are_read_once_for_each_token(model: str) -> None:
    async def scene() -> tuple[int, list[str]]:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        decoded = []
        decode = endpoint.tokenizer.decode
        endpoint.tokenizer.decode = lambda ids: decoded.append(ids) or decode(ids)
        renderer = endpoint.get_renderer("task", PromptFormat())
        talk = Conversation(LongEngine(), SETTINGS, renderer, lambda turn: turn, 50_000)
        with endpoint.open_rollout(talk) as access:
            status, text = await post(f"{access.base_url}/completions", b'{"prompt": [1], "n": 4}')
        await endpoint.runner.cleanup()
        assert status == 200
        return len(decoded), json.loads(text)["choices"][3]["logprobs"]["tokens"]

    assert asyncio.run(scene()) == (1, ["d"] * 20_000)


def test_long_chains_of_calls_are_compared_token_by_token(model: str) -> None:
    """Also where the prompt of each call is found among those of a thousand others."""

    async def scene() -> int:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        renderer = endpoint.get_renderer("task", PromptFormat())
        talk = DirectConversation(Engine(), SETTINGS, renderer, lambda turn: turn, 5_000)
        ids = [1]
        for _ in range(900):
            response = await talk.complete(ids)
            ids = [*map(int, response.tokens), 5]
        await endpoint.runner.cleanup()
        return len(talk.list_segments())

    began = time.process_time()
    assert asyncio.run(scene()) == 1
    assert time.process_time() - began < 15
