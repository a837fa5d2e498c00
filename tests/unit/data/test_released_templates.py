"""The templates that the tests rebuild write what the makers' own software writes."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.released.table import ADD, BY_NAME, SYSTEM, USER, calls, results


@pytest.fixture(scope="module")
def encoder() -> Any:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.v3(is_tekken=True)


def as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """A message as clients send it, with arguments of calls as text."""
    if "tool_calls" not in message:
        return message
    functions = [{**call["function"], "arguments": json.dumps(call["function"]["arguments"])} for call in calls(2)]
    return {
        **message,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls(2), functions, strict=True)],
    }


ANSWER = {"role": "assistant", "content": "There are 12."}
CALLING = {"role": "assistant", "content": "", "tool_calls": calls(2)}


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([USER], None),
        ([SYSTEM, USER, ANSWER, USER], None),
        ([USER, ANSWER, {"role": "user", "content": "And 9?"}], [ADD]),
        ([USER, CALLING, *results(2)], [ADD]),
    ],
    ids=["first turn", "system", "tools", "results"],
)
def test_mistral_nemo_as_mistral_common(encoder: Any, messages: Sequence[Any], tools: list[Any] | None) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    sent = ChatCompletionRequest.from_openai(messages=[as_openai(message) for message in messages], tools=tools)
    assert BY_NAME["mistral_nemo"].render(messages, tools=tools) == encoder.encode_chat_completion(sent).text
