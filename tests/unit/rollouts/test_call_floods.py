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
from megatron_grpo.rollouts.conversation import OPEN_CALLS
from tests.support.asked_endpoint import Engine, begin_talk, head, open_endpoint, open_rollout
from tests.support.asked_endpoint import model as model  # a fixture
from tests.support.direct_conversation import deliver_at_once


async def test_bodies_that_never_come_are_bounded(model: str) -> None:
    async with open_rollout(model) as (_, access, endpoint):
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
        lines = [task.result() for task in finished]
    assert [line.split()[1] for line in lines] == [b"429"] * 6


async def test_responses_of_a_rollout_are_read_one_at_a_time(model: str) -> None:
    reading, peak = 0, 0

    async def read(output: GenerationOutput, text: str, number: int) -> dict[str, Any]:
        nonlocal reading, peak
        reading += 1
        peak = max(peak, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return {"role": "assistant", "content": text}

    async with open_endpoint(model) as endpoint:
        talk = begin_talk(endpoint, Engine())
        await asyncio.gather(*(talk.chat([{"role": "user", "content": "ab"}], read=read) for _ in range(8)))
    assert peak == 1


class LongEngine(Engine):
    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        tokens = 20_000
        ids, logprobs = np.full(tokens, 3, dtype=np.int32), np.full(tokens, -0.25, dtype=np.float32)
        return GenerationOutput(
            token_ids=ids, logprobs=logprobs, text="d" * tokens, stop_reason="stop", spans=[Span(0, tokens, 1)]
        )


async def test_a_stream_that_is_left_in_the_middle_counts(model: str) -> None:
    """A stream that the agent leaves counts: its beginning may have been all that the agent wanted."""
    async with open_endpoint(model) as endpoint:
        talk = begin_talk(endpoint, LongEngine(), 50_000)
        with endpoint.open_rollout(talk) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key=access.token, max_retries=0)
            call: Any = {"messages": [{"role": "user", "content": "ab"}], "n": 8, "logprobs": True}
            stream = await client.chat.completions.create(model="policy", stream=True, **call)
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(60):
                while len(talk.responses) < 8:
                    await asyncio.sleep(0.01)


async def post(url: str, body: bytes, **headers: str) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer right", **headers}
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_calls_are_no_larger_than_others(model: str, coding: str, compress: Any) -> None:
    body = compress(b" " * 100_000_000)
    began = time.process_time()
    async with open_rollout(model) as (_, access, _):
        status, text = await post(f"{access.base_url}/chat/completions", body, **{"Content-Encoding": coding})
    assert (status, "the request has more than 68096 bytes" in text) == (400, True)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("value", ["[]", "{}", "0", '{"a":0}', '[[],""]'])
async def test_calls_of_very_many_values_are_refused(model: str, value: str) -> None:
    async with open_rollout(model) as (_, access, _):
        bodies = []
        for values in (1000, 6000):
            metadata = {"a": json.loads(f"[{','.join([value] * values)}]")}
            call = {"messages": [{"role": "user", "content": "ab"}], "metadata": metadata}
            bodies.append(json.dumps(call).encode())
        (few, _), (many, text) = [await post(f"{access.base_url}/chat/completions", body) for body in bodies]
    assert (few, many) == (200, 400)
    assert "more than 4256 values" in text


async def test_the_texts_of_a_long_answer_are_read_once_for_each_token(model: str) -> None:
    decoded = []
    async with open_endpoint(model) as endpoint:
        decode = endpoint.tokenizer.decode
        endpoint.tokenizer.decode = lambda ids: decoded.append(ids) or decode(ids)
        with endpoint.open_rollout(begin_talk(endpoint, LongEngine(), 50_000)) as access:
            status, text = await post(f"{access.base_url}/completions", b'{"prompt": [1], "n": 4}')
    assert status == 200
    assert (len(decoded), json.loads(text)["choices"][3]["logprobs"]["tokens"]) == (1, ["d"] * 20_000)


async def test_long_chains_of_calls_are_compared_token_by_token(model: str) -> None:
    """Also where the prompt of each call is found among those of a thousand others."""
    began = time.process_time()
    async with open_endpoint(model) as endpoint:
        talk = deliver_at_once(begin_talk(endpoint, Engine(), 5_000))
        ids = [1]
        for _ in range(900):
            response = await talk.complete(ids)
            ids = [*map(int, response.tokens), 5]
    assert len(talk.list_segments()) == 1
    assert time.process_time() - began < 15
