"""An endpoint over a loopback socket that an agent asks in a rollout; the engine writes a script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from megatron_grpo.rollouts.failures import RolloutFailure

LETTERS = "abcdefghij"
SETTINGS = SamplingSettings(max_new_tokens=8, temperature=0.5)
ANSWER = [3, 4]
LOGPROBS = [-0.25, -1.5]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="j"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = (
        "{% if tools %}g{% endif %}{% for message in messages %}{{ message['content'] }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}i"
        "{% endfor %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(tmp_path)
    return str(tmp_path)


class Engine:
    failing = False

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        if self.failing:
            raise RolloutFailure("the engine gave it up")
        return GenerationOutput(
            token_ids=np.array(ANSWER, dtype=np.int32),
            logprobs=np.array(LOGPROBS, dtype=np.float32),
            text="de",
            stop_reason="stop",
            spans=[Span(0, 2, 1)],
        )


@asynccontextmanager
async def open_endpoint(model: str, *, token: str | None = None, **settings: Any) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=token, tokenizer=model, **settings))
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.runner.cleanup()
        endpoint.texts.close()


def begin_talk(
    endpoint: Endpoint, engine: Any, longest: int = 40, *, settings: SamplingSettings = SETTINGS
) -> Conversation:
    renderer = endpoint.get_renderer("task", PromptFormat())
    return Conversation(engine, settings, renderer, lambda turn: turn, longest, endpoint.texts)


@asynccontextmanager
async def open_rollout(
    model: str, *, token: str | None = "right", key: str | None = None, failing: bool = False
) -> AsyncIterator[tuple[AsyncOpenAI, ModelAccess, Endpoint]]:
    """What an agent has in a rollout, and the endpoint behind it."""
    engine = Engine()
    engine.failing = failing
    async with open_endpoint(model, token=token) as endpoint:
        with endpoint.open_rollout(begin_talk(endpoint, engine)) as access:
            yield AsyncOpenAI(base_url=access.base_url, api_key=key or access.token, max_retries=0), access, endpoint


def head(path: str, *headers: str, length: int | str) -> bytes:
    kind = [] if any(header.startswith("Content-Type") for header in headers) else ["Content-Type: application/json"]
    host = [] if any(header.startswith("Host") for header in headers) else ["Host: 127.0.0.1"]
    lines = [*host, *kind, f"Content-Length: {length}", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


class SlowEngine(Engine):
    """Answers at once or never, by the number of the call; counts the calls that were cancelled."""

    def __init__(self, stuck: range) -> None:
        self.stuck, self.calls, self.cancelled = stuck, 0, 0

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.calls += 1
        if self.calls - 1 in self.stuck:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await super().generate(request, settings)
