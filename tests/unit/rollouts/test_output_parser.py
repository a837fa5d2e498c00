"""Messages of responses by vLLM's own parsers."""

import json
from typing import Any

import numpy as np
import pytest

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.call_texts import TextReader
from tests.support.released.table import ADD, BY_NAME


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(BY_NAME["qwen3"].write(tmp_path_factory.mktemp("parser") / "model"))


def read(tokenizer: Any, text: str, tools: list[Any] | None, reasoning: str | None = "qwen3") -> dict[str, Any]:
    ids = np.array(tokenizer.encode(text), dtype=np.int32)
    return TextReader(tokenizer, "hermes", reasoning).read(tools, {}, ids, text, 7)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_thinking_text_and_parallel_calls_are_divided(tokenizer: Any) -> None:
    message = read(tokenizer, f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}", [ADD])
    assert (message["role"], message["reasoning_content"].strip(), message["content"].strip()) == (
        *("assistant", "Hm.", "I add."),
    )
    assert [call["id"] for call in message["tool_calls"]] == ["call00700", "call00701"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1, "b": 2}] * 2


def test_without_tools_or_with_a_malformed_call_the_text_is_the_message(tokenizer: Any) -> None:
    assert read(tokenizer, CALL, None, None) == {"role": "assistant", "content": CALL}
    broken = "<tool_call>\n{nothing}\n</tool_call>"
    assert read(tokenizer, broken, [ADD], None) == {"role": "assistant", "content": broken}


def test_parsers_and_tools_that_do_not_fit_are_told(tokenizer: Any) -> None:
    with pytest.raises(SamplingError, match="tool_parser=mistral and reasoning_parser=None do not fit"):
        TextReader(tokenizer, "mistral", None)
    with pytest.raises(BadCallError, match="tools: "):
        TextReader(tokenizer, "hermes", None).check_tools([{"type": "function"}], {})
