"""The endpoint as OpenAI's own client sees it, over a loopback socket; the engine writes a script."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from megatron_grpo.rollouts.failures import RolloutFailure

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


def ask(
    model: str, question: Ask, *, token: str | None = "right", key: str | None = None, failing: bool = False
) -> Any:
    """What an agent gets in a rollout."""

    async def rollout() -> Any:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=token, tokenizer=model))
        await endpoint.start()
        engine = Engine()
        engine.failing = failing
        talk = Conversation(engine, SETTINGS, endpoint.get_renderer("task", PromptFormat()), lambda turn: turn, 40)
        try:
            with endpoint.open_rollout(talk) as access:
                client = AsyncOpenAI(base_url=access.base_url, api_key=key or access.token, max_retries=0)
                return await question(client, access, endpoint)
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
    assert [(entry.token, entry.logprob) for entry in choice.logprobs.content] == [("d", -0.25), ("e", -1.5)]
    assert first.usage.prompt_tokens == len("abi")
    assert second.usage.prompt_tokens == len("abi") + len(ANSWER) + len("ici")


def test_streams_say_what_answers_say(model: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        call: dict[str, Any] = {"model": access.model, "messages": [{"role": "user", "content": "ab"}], "n": 2}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**call, **options)]
        full_stream = await client.chat.completions.create(**call)
        texts = [part async for part in await client.completions.create(model="policy", prompt=[1, 2], stream=True)]
        return chunks, full_stream, texts

    chunks, full_stream, texts = ask(model, agent)
    parts = [[chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == i] for i in (0, 1)]
    assert ["".join(part.delta.content or "" for part in choice) for choice in parts] == ["de", "de"]
    assert [choice[-1].finish_reason for choice in parts] == ["stop", "stop"]
    assert [choice[-1].model_extra["token_ids"] for choice in parts] == [ANSWER, ANSWER]
    assert chunks[-1].usage == full_stream.usage
    assert full_stream.usage.completion_tokens == 4
    assert "".join(part.choices[0].text for part in texts) == "de"


def test_a_stop_of_the_call_ends_the_text(model: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        message: list[Any] = [{"role": "user", "content": "a"}]
        return await client.chat.completions.create(model=access.model, messages=message, stop="e")

    answer = ask(model, agent)
    assert answer.choices[0].message.content == "d"
    assert answer.choices[0].model_extra["token_ids"] == ANSWER


class Calls:
    """A parser: the model calls `add` unless a tool has answered; its first letter is what it thinks."""

    def check_tools(self, tools: Any, variables: Any) -> None:
        assert tools == [{"type": "function", "function": ADD}]
        assert variables == {"reasoning_effort": "low"}

    def read(self, tools: Any, variables: Any, token_ids: Any, text: str, number: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": text[1:], "reasoning_content": text[0], "reasoning": text[0]}
        if number:
            return message
        function = {"name": "add", "arguments": '{"a": 1}'}
        calls = [{"id": f"call{index}", "type": "function", "function": function} for index in range(2)]
        return {**message, "content": None, "tool_calls": calls}


ADD: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def calling(agent: Ask) -> Ask:
    async def ask_with_parser(client: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        endpoint.texts.reader.parser = cast("Any", Calls())
        return await agent(client, access, endpoint)

    return ask_with_parser


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_calls_are_objects_and_their_results_continue_the_conversation(model: str, is_streamed: bool) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        messages: list[Any] = [{"role": "user", "content": "ab"}]
        tools: Any = [{"type": "function", "function": ADD}]
        call: dict[str, Any] = {"model": access.model, "tools": tools, "reasoning_effort": "low"}
        if is_streamed:
            async with client.chat.completions.stream(messages=messages, **call) as stream:
                first = await stream.get_final_completion()
        else:
            first = await client.chat.completions.create(messages=messages, **call)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert [tool_call.function.name for tool_call in message.tool_calls or []] == ["add", "add"]
        assert message.model_extra["reasoning_content"] == "d"
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        messages += [
            {"role": "tool", "tool_call_id": tool_call.id, "content": "c"} for tool_call in message.tool_calls or []
        ]
        second = await client.chat.completions.create(messages=messages, **call)
        (open_rollout,) = endpoint._open.values()
        return second, open_rollout.conversation.list_segments()

    second, segments = ask(model, calling(agent))
    assert second.choices[0].message.content == "e"
    assert len(segments) == 2, "this template does not show the thinking that was sampled"


def test_responses_with_tools_and_a_previous_response(model: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        call: dict[str, Any] = {"model": access.model, "tools": [{"type": "function", **ADD}]}
        call |= {"reasoning": {"effort": "low"}, "instructions": "be"}
        first = await client.responses.create(input="ab", **call)
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "c"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(input=results, previous_response_id=first.id, **call)
        items: Any = [{"role": "user", "content": "ab"}, *(item.model_dump() for item in first.output), *results]
        third = await client.responses.create(input=items, **call)
        events = [event async for event in await client.responses.create(input=items, stream=True, **call)]
        async with client.responses.stream(input=items, **call) as stream:
            final = await stream.get_final_response()
        with pytest.raises(openai.BadRequestError, match="no response of this rollout has this id"):
            await client.responses.create(input="a", previous_response_id="resp_99", **call)
        with pytest.raises(openai.BadRequestError, match="there are no built-in tools here"):
            await client.responses.create(model=access.model, input="a", tools=[{"type": "web_search"}])
        return first, second, third, events, final

    first, second, third, events, final = ask(model, calling(agent))
    assert [item.type for item in first.output] == ["reasoning", "function_call", "function_call"]
    assert [item.arguments for item in first.output[1:]] == ['{"a": 1}'] * 2
    assert (second.output_text, third.output_text, final.output_text) == ("e", "e", "e")
    assert second.usage.input_tokens == third.usage.input_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "e"


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
        ({"n": 65}, "n=65: at most 64 responses at a time"),
        ({"seed": 3}, "seed: not accepted"),
        ({"stop": ["a"] * 5}, "stop: give a text or a list of at most 4 texts"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs=2: only the sampled token's log-probability is known"),
        ({"tool_choice": "required"}, "tool_choice=required: calls cannot be forced"),
        ({"response_format": {"type": "json_object"}}, "set for all rollouts by generation.structured"),
        ({"max_tokens": 0}, "max_tokens=0: give a number above 0"),
        ({"messages": []}, "messages: give a list of objects"),
        ({"messages": [{"role": "user", "content": "a" * 60}]}, "leave no room within"),
    ],
)
def test_what_would_not_be_trained_on_as_sampled_is_refused(model: str, call: dict[str, Any], text: str) -> None:
    async def agent(client: AsyncOpenAI, access: ModelAccess, _: Endpoint) -> Any:
        request: dict[str, Any] = {"model": access.model, "messages": [{"role": "user", "content": "a"}], **call}
        with pytest.raises(openai.BadRequestError, match=text):
            await client.chat.completions.create(**request)

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
        first = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await first.start()
        second = Endpoint(EndpointSettings(host="127.0.0.1", port=first.port, token=None, tokenizer=model))
        pattern = rf"generation.endpoint.host=127.0.0.1 and port={first.port}"
        with pytest.raises(SamplingError, match=pattern):
            await second.start()
        await first.runner.cleanup()

    asyncio.run(twice())


async def send_pieces(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[int | None, float]:
    """Send a request in pieces; the answer's status and seconds. None: the connection was closed without an answer."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.readline())
    for piece in pieces:
        if reading.done():
            break
        writer.write(piece)
        await asyncio.sleep(pause_s)
    try:
        line = await asyncio.wait_for(reading, 10)
    except ConnectionResetError:  # it was closed while the client wrote
        line = b""
    writer.close()
    return int(line.split()[1]) if line else None, time.monotonic() - began


def head(path: str, *headers: str, length: int | str) -> bytes:
    kind = [] if any(header.startswith("Content-Type") for header in headers) else ["Content-Type: application/json"]
    host = [] if any(header.startswith("Host") for header in headers) else ["Host: 127.0.0.1"]
    lines = [*host, *kind, f"Content-Length: {length}", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


MESSAGE = b'{"messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ([], MESSAGE + b"}", 200),
        ([], b"", 400),
        ([], MESSAGE, 400),
        ([], b"\xff\xfe{}", 400),
        ([], b"[" * 100_000, 400),
        ([], b'{"messages": ' + b"9" * 10_000 + b"}", 400),
        ([], b"null", 400),
        ([], MESSAGE + b', "max_tokens": 1e999}', 400),
        ([], MESSAGE + b', "max_tokens": true}', 400),
        ([], MESSAGE + b', "temperature": {}}', 400),
        ([], MESSAGE + b', "tools": {"a": 1}}', 400),
        ([], b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 200),
        ([], b'{"messages": [{"role": "user"}]}', 200),
        ([], b'{"messages": [{"role": "user", "content": [[]]}]}', 400),
        (["Content-Encoding: gzip"], b"no gzip", 400),
        (["Content-Type: application/json; charset=nonsense"], MESSAGE + b"}", 200),
        (["Authorization: Bearer \xff"], MESSAGE + b"}", 401),
        (["Origin: https://evil.example"], MESSAGE + b"}", 403),
        (["Content-Type: text/plain"], MESSAGE + b"}", 415),
        (["Host: evil.example:8000"], MESSAGE + b"}", 421),
    ],
)
def test_malformed_and_foreign_requests_are_refused(model: str, headers: list[str], body: bytes, status: int) -> None:
    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        key = [] if any("Authorization" in header for header in headers) else [f"Authorization: Bearer {access.token}"]
        return await send_pieces(endpoint.port, head(path, *headers, *key, length=len(body)) + body)

    assert ask(model, agent)[0] == status


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_another_method_gets_405(model: str, method: str) -> None:
    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        answer_head = head(path, f"Authorization: Bearer {access.token}", length=0)
        return await send_pieces(endpoint.port, answer_head.replace(b"POST", method.encode(), 1))

    assert ask(model, agent)[0] == 405


@pytest.mark.parametrize("length", ["header", "chunks"])
def test_a_huge_request_gets_413(model: str, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Endpoint.__module__}.BODY_BYTES", 1000)

    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        key = f"Authorization: Bearer {access.token}"
        if length == "header":
            return await send_pieces(endpoint.port, head(path, key, length=5000) + b"x" * 5000)
        chunked = head(path, key, length=0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        return await send_pieces(endpoint.port, chunked, *[b"1f4\r\n" + b"x" * 500 + b"\r\n"] * 10, b"0\r\n\r\n")

    assert ask(model, agent)[0] == 413


@pytest.mark.parametrize(("part", "status"), [("head", None), ("body", 408)])
def test_a_slow_request_is_ended(model: str, part: str, status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Endpoint.__module__}.REQUEST_S", 0.5)

    async def agent(client: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        request_head = head(path, f"Authorization: Bearer {access.token}", length=1000)
        pieces = [request_head] if part == "body" else []
        slow = [bytes([byte]) for byte in (b" " * 200 if part == "body" else request_head)]
        actual = await send_pieces(endpoint.port, *pieces, *slow, pause_s=0.05)
        messages: list[Any] = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model=access.model, messages=messages)
        return actual

    actual, seconds = ask(model, agent)
    assert actual == status
    assert seconds < 5


def test_half_open_connections_are_bounded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Endpoint.__module__}.IDLE_CONNECTIONS", 5)
    monkeypatch.setattr(f"{Endpoint.__module__}.REQUEST_S", 5.0)

    async def agent(_: AsyncOpenAI, access: ModelAccess, endpoint: Endpoint) -> Any:
        opened = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(20)]
        for _, writer in opened:
            writer.write(b"POST / HTTP/1.1\r\n")
        await asyncio.sleep(2)
        closed = [reader.at_eof() for reader, _ in opened]
        for _, writer in opened:
            writer.close()
        return closed

    assert ask(model, agent) == [True] * 15 + [False] * 5, "the oldest are closed"


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


async def settle(engine: SlowEngine, cancelled: int) -> None:
    async with asyncio.timeout(5):
        while engine.cancelled < cancelled:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("choices", "stuck"), [(1, range(1)), (8, range(5, 8))])
def test_what_a_client_gave_up_on_is_not_trained_on(model: str, choices: int, stuck: range, is_streamed: bool) -> None:
    """A time-out of the client's own, and its repetition."""

    async def scene() -> None:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        engine = SlowEngine(stuck)
        talk = Conversation(engine, SETTINGS, endpoint.get_renderer("task", PromptFormat()), lambda turn: turn, 40)
        call: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "n": choices, "stream": is_streamed}
        with endpoint.open_rollout(talk) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key=access.token, max_retries=0)
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model=access.model, timeout=0.2, **call)
            await settle(engine, len(stuck))
            assert talk.responses == [], "neither those that were complete nor the others"
            answer = await client.chat.completions.create(model=access.model, **call)
            if is_streamed:
                assert [chunk async for chunk in answer]
            assert len(talk.responses) == choices
            assert len(talk.list_segments()) == choices
            assert talk.failure is None
        await endpoint.runner.cleanup()

    asyncio.run(scene())


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_client_that_went_away_leaves_no_response(model: str, path: str) -> None:
    """A process that ends in its call: a bare connection that is closed, at once or while the model writes."""

    async def scene() -> None:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token=None, tokenizer=model))
        await endpoint.start()
        engine = SlowEngine(range(1))
        talk = Conversation(engine, SETTINGS, endpoint.get_renderer("task", PromptFormat()), lambda turn: turn, 40)
        key = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
        content: Any = [{"role": "user", "content": "ab"}] if key == "messages" else "ab"
        body = json.dumps({"model": "policy", key: content}).encode()
        with endpoint.open_rollout(talk) as access:
            target = access.base_url.partition(f":{endpoint.port}")[2]
            head = f"POST {target}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            kind = "Content-Type: application/json\r\n\r\n"
            for stuck in (1, 0):
                _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
                writer.write(head.encode() + kind.encode() + body)
                while stuck and not engine.calls:
                    await asyncio.sleep(0.01)
                writer.close()
                await asyncio.sleep(0.1)
                assert (talk.responses, engine.cancelled) == ([], 1)
        await endpoint.runner.cleanup()

    asyncio.run(scene())
