"""The endpoint as OpenAI's own client sees it, over a loopback socket; the engine writes a script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.data.trajectory import Span
from megatron_grpo.sampler.conversation import Conversation
from megatron_grpo.sampler.endpoint import Endpoint, EndpointSettings
from megatron_grpo.sampler.plan import RolloutFailure

LETTERS = "abcdefghij"
SETTINGS = SamplingSettings(max_new_tokens=8, temperature=0.5)
ANSWER = [3, 4]
LOGPROBS = [-0.25, -1.5]
Ask = Callable[[AsyncOpenAI, ModelAccess, Endpoint], Awaitable[Any]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="j"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['content'] }}i{% endfor %}"
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


def ask(model: str, what: Ask, *, token: str | None = "right", key: str | None = None, failing: bool = False) -> Any:
    """What an agent gets in a rollout."""

    async def rollout() -> Any:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=token, model_path=model))
        await endpoint.start()
        engine = Engine()
        engine.failing = failing
        talk = Conversation(engine, SETTINGS, endpoint.tokenizer, lambda turn: turn, 40)
        try:
            with endpoint.opened(talk) as access:
                client = AsyncOpenAI(base_url=access.base_url, api_key=key or access.token, max_retries=0)
                return await what(client, access, endpoint)
        finally:
            await endpoint.runner.cleanup()

    return asyncio.run(rollout())


def test_chat(model: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        messages: list[Any] = [{"role": "user", "content": "ab"}]
        first = await client.chat.completions.create(
            model=access.model, messages=messages, logprobs=True, temperature=0.5, n=1, max_completion_tokens=4
        )
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "c"}]
        return first, await client.chat.completions.create(model=access.model, messages=messages)

    first, second = ask(model, agent)
    (choice,) = first.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "de", "stop")
    assert choice.model_extra["token_ids"] == ANSWER
    assert [(one.token, one.logprob) for one in choice.logprobs.content] == [("d", -0.25), ("e", -1.5)]
    assert first.usage.prompt_tokens == len("abi")
    assert second.usage.prompt_tokens == len("abi") + len(ANSWER) + len("ici")


def test_completions_and_models(model: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        (listed,) = (await client.models.list()).data
        return listed.id, await client.completions.create(model=listed.id, prompt=[1, 2])

    name, answer = ask(model, agent)
    assert name == "policy"
    (choice,) = answer.choices
    assert choice.text == "de"
    assert choice.logprobs.token_logprobs == LOGPROBS


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"temperature": 1.0}, r"temperature=1.0: every call of this run has 0.5; leave it out"),
        ({"n": 2}, "n=2: every call of this run has 1"),
        ({"stream": True}, "stream=True: every call of this run has False"),
        ({"stop": ["x"], "seed": 3}, "seed, stop: not taken here"),
        ({"max_tokens": 0}, "max_tokens=0: give a number above 0"),
        ({"messages": []}, "messages: give a list of objects"),
        ({"messages": [{"role": "user", "content": "a" * 60}]}, "leave no room within"),
    ],
)
def test_what_would_not_be_trained_on_as_sampled_is_refused(model: str, call: dict[str, Any], text: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        given: dict[str, Any] = {"model": access.model, "messages": [{"role": "user", "content": "a"}], **call}
        with pytest.raises(openai.BadRequestError, match=text):
            await client.chat.completions.create(**given)

    ask(model, agent)


def test_who_has_not_the_token_or_no_rollout_gets_nothing(model: str) -> None:
    message: list[Any] = [{"role": "user", "content": "a"}]

    async def stranger(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model=access.model, messages=message)

    async def late(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        base = f"http://127.0.0.1:{endpoint.port}"
        for url in (f"{base}/v1", f"{base}/rollouts/other/v1"):
            client = AsyncOpenAI(base_url=url, api_key=access.token, max_retries=0)
            with pytest.raises(openai.NotFoundError, match="no open rollout has this name"):
                await client.chat.completions.create(model=access.model, messages=message)
        client = AsyncOpenAI(base_url=f"{base}/v1", api_key=access.token)
        name = access.base_url.split("/")[-2]
        return await client.chat.completions.create(
            model=access.model, messages=message, extra_headers={"X-Rollout-Id": name}
        )

    ask(model, stranger, key="wrong")
    assert ask(model, late).choices[0].message.content == "de"
    assert ask(model, late, token=None).choices[0].message.content == "de"


def test_what_the_engine_gives_up_is_told(model: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        with pytest.raises(openai.InternalServerError, match="the engine gave it up"):
            await client.completions.create(model=access.model, prompt="a")

    ask(model, agent, failing=True)


def test_an_address_that_is_taken_is_told(model: str) -> None:
    async def twice() -> None:
        first = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, model_path=model))
        await first.start()
        second = Endpoint(EndpointSettings(host="127.0.0.1", port=first.port, token=None, model_path=model))
        told = rf"generation.endpoint.host=127.0.0.1 and port={first.port}"
        with pytest.raises(SamplingError, match=told):
            await second.start()
        await first.runner.cleanup()

    asyncio.run(twice())
