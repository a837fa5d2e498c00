"""The endpoint as OpenAI's own client sees it, over a loopback socket; the engine writes a script."""

from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.rollouts.call_texts import TextReader
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from tests.support.asked_endpoint import ANSWER, LOGPROBS, open_endpoint, open_rollout
from tests.support.asked_endpoint import model as model  # a fixture


async def test_chat(model: str) -> None:
    async with open_rollout(model) as (client, access, _):
        messages: list[Any] = [{"role": "user", "content": "ab"}]
        first = await client.chat.completions.create(
            model=access.model, messages=messages, logprobs=True, temperature=0.5, n=1, max_completion_tokens=4
        )
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "c"}]
        second = await client.chat.completions.create(model=access.model, messages=messages)
    (choice,) = first.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "de", "stop")
    assert choice.model_extra["token_ids"] == ANSWER
    assert [(entry.token, entry.logprob) for entry in choice.logprobs.content] == [("d", -0.25), ("e", -1.5)]
    assert first.usage.prompt_tokens == len("abi")
    assert second.usage.prompt_tokens == len("abi") + len(ANSWER) + len("ici")


async def test_streams_say_what_answers_say(model: str) -> None:
    async with open_rollout(model) as (client, access, _):
        call: dict[str, Any] = {"model": access.model, "messages": [{"role": "user", "content": "ab"}], "n": 2}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**call, **options)]
        full_stream = await client.chat.completions.create(**call)
        texts = [part async for part in await client.completions.create(model="policy", prompt=[1, 2], stream=True)]
    parts = [[chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == i] for i in (0, 1)]
    assert ["".join(part.delta.content or "" for part in choice) for choice in parts] == ["de", "de"]
    assert [choice[-1].finish_reason for choice in parts] == ["stop", "stop"]
    assert [choice[-1].model_extra["token_ids"] for choice in parts] == [ANSWER, ANSWER]
    assert chunks[-1].usage == full_stream.usage
    assert full_stream.usage.completion_tokens == 4
    assert "".join(part.choices[0].text for part in texts) == "de"


async def test_a_stop_of_the_call_ends_the_text(model: str) -> None:
    async with open_rollout(model) as (client, access, _):
        message: list[Any] = [{"role": "user", "content": "a"}]
        answer = await client.chat.completions.create(model=access.model, messages=message, stop="e")
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


def replace_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_tools", "read"):
        monkeypatch.setattr(TextReader, name, getattr(Calls, name))


ADD: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tool_calls_are_objects_and_their_results_continue_the_talk(
    model: str, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_parser(monkeypatch)
    async with open_rollout(model) as (client, access, endpoint):
        endpoint.texts.config = replace(endpoint.texts.config, tool_parser="calls")
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
        (rollout,) = endpoint._open.values()
        segments = rollout.conversation.list_segments()
    assert second.choices[0].message.content == "e"
    assert len(segments) == 2, "this template does not show the thinking that was sampled"


async def test_responses_with_tools_and_a_previous_response(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parser(monkeypatch)
    async with open_rollout(model) as (client, access, endpoint):
        endpoint.texts.config = replace(endpoint.texts.config, tool_parser="calls")
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
    assert [item.type for item in first.output] == ["reasoning", "function_call", "function_call"]
    assert [item.arguments for item in first.output[1:]] == ['{"a": 1}'] * 2
    assert (second.output_text, third.output_text, final.output_text) == ("e", "e", "e")
    assert second.usage.input_tokens == third.usage.input_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "e"


async def test_completions_and_models(model: str) -> None:
    async with open_rollout(model) as (client, _, _):
        (listed,) = (await client.models.list()).data
        answer = await client.completions.create(model=listed.id, prompt=[1, 2])
    assert listed.id == "policy"
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
async def test_what_would_not_be_trained_on_as_sampled_is_refused(model: str, call: dict[str, Any], text: str) -> None:
    async with open_rollout(model) as (client, access, _):
        request: dict[str, Any] = {"model": access.model, "messages": [{"role": "user", "content": "a"}], **call}
        with pytest.raises(openai.BadRequestError, match=text):
            await client.chat.completions.create(**request)


async def test_who_has_not_the_token_or_no_rollout_gets_nothing(model: str) -> None:
    call: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
    async with open_rollout(model, key="wrong") as (client, _, _):
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**call)
    for token in ("right", None):
        async with open_rollout(model, token=token) as (_, access, endpoint):
            base = f"http://127.0.0.1:{endpoint.port}"
            for url in (f"{base}/v1", f"{base}/rollouts/other/v1"):
                client = AsyncOpenAI(base_url=url, api_key=access.token, max_retries=0)
                with pytest.raises(openai.NotFoundError, match="no open rollout has this name"):
                    await client.chat.completions.create(**call)
            client = AsyncOpenAI(base_url=f"{base}/v1", api_key=access.token)
            rollout = {"X-Rollout-Id": access.base_url.split("/")[-2]}
            answer = await client.chat.completions.create(**call, extra_headers=rollout)
            assert answer.choices[0].message.content == "de"


async def test_what_the_engine_gives_up_is_told(model: str) -> None:
    async with open_rollout(model, failing=True) as (client, access, _):
        with pytest.raises(openai.InternalServerError, match="the engine gave it up"):
            await client.completions.create(model=access.model, prompt="a")


async def test_an_address_that_is_taken_is_told(model: str) -> None:
    async with open_endpoint(model) as first:
        second = Endpoint(EndpointSettings(host="127.0.0.1", port=first.port, token=None, tokenizer=model))
        with pytest.raises(SamplingError, match=rf"generation.endpoint.host=127.0.0.1 and port={first.port}"):
            await second.start()
