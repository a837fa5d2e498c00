"""What one rollout sends holds up no other rollout of its worker: parsers, templates, sizes, calls and segments."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.config.generation_schema import EndpointConfig
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.call_texts import CallTexts
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.endpoint import Endpoint
from tests.support.asked_endpoint import begin_talk, open_endpoint
from tests.support.direct_conversation import DirectConversation

BEGIN, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
MARKS = [BEGIN, "<｜tool▁calls▁end｜>", CALL, "<｜tool▁call▁end｜>", SEPARATOR]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if mode == 'large' %}{{ 'a'.ljust(3000000000) | length }}{% endif %}"
    "{% if mode == 'doubled' %}{% set s = namespace(a='a' * 999) %}"
    "{% for i in range(29) %}{% set s.a = s.a ~ s.a %}{% endfor %}{{ s.a | length }}{% endif %}"
    "{% if mode == 'endless' %}" + "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3 + "{% endif %}"
    "{% for message in messages %}{{ message['content'] }}i{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    core = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate("abcdefghij")}, unk_token="j"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.add_special_tokens(MARKS)
    folder: Path = tmp_path_factory.mktemp("limits")
    PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE).save_pretrained(folder)
    return str(folder)


class Says:
    """An engine that answers every call with a text."""

    def __init__(self, text: str, tokens: int = 1) -> None:
        self._text, self._tokens = text, tokens

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        return GenerationOutput(
            token_ids=np.full(self._tokens, 3, dtype=np.int32),
            logprobs=np.zeros(self._tokens, dtype=np.float32),
            text=self._text,
            stop_reason="length",
            spans=[Span(0, self._tokens, 1)],
        )


Talk = Callable[[Any], Conversation]


@asynccontextmanager
async def open_limited(model: str, *, limited: bool = True, **config: Any) -> AsyncIterator[tuple[Endpoint, Talk]]:
    settings = SamplingSettings(max_new_tokens=8192)
    async with open_endpoint(model, config=EndpointConfig(**config), limited=limited) as endpoint:
        yield endpoint, lambda engine: begin_talk(endpoint, engine, 8192, settings=settings)


async def post(url: str, **fields: Any) -> tuple[int, Any]:
    call = {"messages": [{"role": "user", "content": "ab"}], **fields}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=call) as reply:
        return reply.status, await reply.json()


LOOPS = {
    "calls that never end": BEGIN + (CALL + SEPARATOR) * 1200,
    "names that never end": BEGIN + CALL + SEPARATOR * 2400,
    "separators of one call": BEGIN + (CALL + SEPARATOR + SEPARATOR) * 800,
}


async def test_a_response_that_a_parser_cannot_end_has_no_calls_and_holds_up_nobody(model: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with open_limited(model, tool_parser="deepseek_v3", text_cpu_s=0.4) as (endpoint, talk):
        for text in LOOPS.values():
            looping, ordinary = talk(Says(text, 2401)), talk(Says("de"))
            with endpoint.open_rollout(looping) as first, endpoint.open_rollout(ordinary) as second:
                slow = asyncio.create_task(post(first.base_url, tools=tools))
                await asyncio.sleep(0.05)
                used = time.process_time()
                status, answer = await post(second.base_url, tools=tools)
                assert (status, answer["choices"][0]["message"]["content"]) == (200, "de")
                status, answer = await slow
                assert time.process_time() - used < 0.4, "nothing of it is read in the worker's process"
            message = answer["choices"][0]["message"]
            assert (status, message["role"], "tool_calls" in message) == (200, "assistant", False)
            assert [len(response.output.token_ids) for response in looping.responses] == [2401], "it is learnt from"
        with endpoint.open_rollout(talk(Says(f"{BEGIN}{CALL}function{SEPARATOR}f\n```json\n{{}}\n```{MARKS[3]}"))) as a:
            _, answer = await post(a.base_url, tools=tools)
            assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


async def test_templates_without_end_or_with_huge_texts_are_told(model: str) -> None:
    async with open_limited(model, text_cpu_s=0.5, text_memory_mib=300) as (endpoint, talk):
        with endpoint.open_rollout(talk(Says("de"))) as access:
            for mode in ("large", "doubled", "endless"):
                status, answer = await post(access.base_url, chat_template_kwargs={"mode": mode})
                text = answer["error"]["message"]
                assert status == 400
                assert "needs more than 0.5 s of a processor or 300 MiB (generation.endpoint.text_cpu_s and" in text
            assert (await post(access.base_url))[0] == 200


class Unread:
    """A tokenizer that may not be asked."""

    chat_template = "{{ messages }}"

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a" * 3_000_000},
        {"role": "user", "content": [{"type": "text", "text": "ab" * 400_000}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "1" * 700_000}}]},
    ],
)
def test_texts_that_cannot_fit_are_refused_by_their_length(message: dict[str, Any]) -> None:
    talk = Conversation(
        Says(""),
        SamplingSettings(max_new_tokens=8),
        PromptRenderer(Unread(), PromptFormat()),
        lambda n: n,
        8192,  # type: ignore[arg-type]
    )
    with pytest.raises(BadCallError, match=r"characters are too long for .*policy\.max_total_sequence_length=8192"):
        asyncio.run(talk.chat([message]))
    for prompt in ("a" * 3_000_000, [1] * 700_000):
        with pytest.raises(BadCallError, match="too long for the context window"):
            asyncio.run(talk.complete(prompt))


async def test_calls_and_segments_of_a_rollout_are_limited() -> None:
    texts = CallTexts(EndpointConfig(max_calls=8, max_segments=3))
    renderer = PromptRenderer(Unread(), PromptFormat())
    settings = SamplingSettings(max_new_tokens=8)
    talk = DirectConversation(Says("de"), settings, renderer, lambda n: n, 100, texts)  # type: ignore[arg-type]
    for token in (1, 2, 3):
        await talk.complete([token])
    with pytest.raises(BadCallError, match=r"has generation\.endpoint\.max_segments=3 conversations"):
        await talk.complete([4])
    for _ in range(5):  # one of them goes on
        await talk.complete([*map(int, talk.last.tokens), 5])
    with pytest.raises(BadCallError, match=r"has had generation\.endpoint\.max_calls=8 calls"):
        await talk.complete([*map(int, talk.last.tokens), 5])
    assert [len(segment.outputs) for segment in talk.list_segments()] == [1, 1, 6]


@pytest.mark.parametrize(("calls", "choices"), [(5, 1), (1, 5), (3, 2)])
async def test_calls_at_the_same_time_begin_no_more_segments_than_others(model: str, calls: int, choices: int) -> None:
    """Each is sampled while the others are being read, so none of them counts yet."""

    async def read(output: GenerationOutput, text: str, number: int) -> dict[str, Any]:
        await asyncio.sleep(0.2)
        return {"role": "assistant", "content": text}

    async with open_limited(model, limited=False, max_segments=3) as (endpoint, talk):
        endpoint.texts.prepare = lambda *_: asyncio.sleep(0, read)  # type: ignore[method-assign, assignment]
        conversation = talk(Says("de"))
        with endpoint.open_rollout(conversation) as access:
            tasks = []
            for _ in range(calls):
                tasks.append(asyncio.create_task(post(access.base_url, n=choices)))
                await asyncio.sleep(0.1)
            statuses = [status for status, _ in await asyncio.gather(*tasks)]
    allowed = 3 // choices
    assert statuses == [200] * allowed + [400] * (calls - allowed)
    assert len(conversation.list_segments()) == allowed * choices


async def test_a_response_that_is_continued_is_not_discarded() -> None:
    """An agent that goes on has read it; what follows would else be a segment of its own."""
    renderer = PromptRenderer(Unread(), PromptFormat())
    settings = SamplingSettings(max_new_tokens=8)
    talk = DirectConversation(Says("de"), settings, renderer, lambda n: n, 100)  # type: ignore[arg-type]
    first = await talk.complete([1])
    second = await talk.complete([*map(int, first.tokens), 5])
    third = await talk.complete([*map(int, second.tokens), 5])
    talk.discard([second])
    talk.discard([third])
    assert [len(segment.outputs) for segment in talk.list_segments()] == [2]


def test_tools_that_cannot_be_read_in_time_are_a_mistake_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def exceed(*_: Any) -> None:
        raise LimitError("needs more than 2 s of a processor")

    calls = object.__new__(LimitedCalls)
    monkeypatch.setattr(calls, "run", exceed)
    texts = CallTexts(EndpointConfig(tool_parser="hermes"))
    monkeypatch.setattr(texts, "_calls", calls)
    with pytest.raises(BadCallError, match=r"reading the tools of the call needs more than .*text_cpu_s"):
        asyncio.run(texts.prepare([{"type": "function"}], {}))
