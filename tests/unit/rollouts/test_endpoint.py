"""The endpoint as OpenAI's own client sees it, over a loopback socket; the engine writes a script."""

import asyncio
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from tests.support.asked_endpoint import ANSWER, LOGPROBS, Ask, ask
from tests.support.asked_endpoint import model as model  # a fixture


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
