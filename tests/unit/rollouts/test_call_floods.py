"""Calls that one rollout floods its worker with: bodies that never come, loops of calls, streams that are left."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.rollouts.conversation import OPEN_CALLS, Conversation
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from tests.unit.rollouts.test_endpoint import SETTINGS, Engine, ask, head
from tests.unit.rollouts.test_endpoint import model as model  # a fixture


def test_bodies_that_never_come_are_bounded(model: str) -> None:
    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> list[bytes]:
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        key = f"Authorization: Bearer {access.token}"
        opened = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(OPEN_CALLS + 6)]
        for _, writer in opened:
            writer.write(head(path, key, length=100))
        await asyncio.sleep(0.5)
        waiting = [asyncio.create_task(reader.readline()) for reader, _ in opened]
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
    """Its beginning may have been all that the agent wanted, so leaving it does not leave the loss."""

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
            await asyncio.sleep(0.3)
        await endpoint.runner.cleanup()
        return len(talk.responses)

    assert asyncio.run(scene()) == 8
