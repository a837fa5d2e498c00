"""Reads reasoning and tool calls of a response with vLLM's parsers, as its server does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.outside_text import clean_json
from megatron_grpo.data.chat_messages import ChatMessage
from megatron_grpo.rollouts.call_prompts import BadCallError

_HARMONY = {"openai", "openai_gptoss"}  # parsers of gpt-oss, which vLLM replaces by one that reads its channels


class OutputParser:
    """Makes messages of responses.

    Made once: vLLM takes seconds to import.
    """

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        """Load the parsers; SamplingError if they do not fit the tokenizer."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs a traceback for every malformed call of a model
        self._request_class = ChatCompletionRequest
        self._has_reasoning = reasoning_parser is not None
        self._tokenizer = get_cached_tokenizer(tokenizer)
        try:
            self._parser_class: Any = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                is_harmony=bool({tool_parser, reasoning_parser} & _HARMONY),
            )
            self._make_reader([], {})
        except Exception as error:  # parsers raise anything about the vocabulary of another model
            keys = f"tool_parser={tool_parser} and reasoning_parser={reasoning_parser}"
            text = f"generation.endpoint: {keys} do not fit the model's tokenizer: {error}"
            raise SamplingError(f"{text}; give the model's, by their names in vllm serve") from error

    def check_tools(self, tools: Sequence[ChatMessage] | None, variables: Mapping[str, Any]) -> None:
        """Raise BadCallError about malformed tools."""
        try:
            self._make_reader(tools or [], variables)
        except Exception as error:  # noqa: BLE001 - pydantic's, and parsers raise anything about malformed tools
            raise BadCallError(f"tools: {error}") from None

    def read(
        self,
        tools: Sequence[ChatMessage] | None,
        variables: Mapping[str, Any],
        token_ids: NDArray[np.int32],
        text: str,
        number: int,
    ) -> dict[str, Any]:
        """Read the message of a conversation's response; malformed ones are plain texts."""
        request, parser = self._make_reader(tools or [], variables)  # parsers have the state of one response
        try:
            parsed = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=token_ids.tolist())
            reasoning, content, calls = parsed
        except Exception:  # noqa: BLE001 - parsers raise anything about malformed responses
            return read_plain_message(text)
        message: dict[str, Any] = clean_json(_make_message(reasoning, content, calls or [], text, number))
        return message

    def _make_reader(self, tools: Sequence[ChatMessage], variables: Mapping[str, Any]) -> tuple[Any, Any]:
        definitions = [dict(tool) for tool in tools] or None
        request = self._request_class(messages=[{"role": "user", "content": "."}], model="", tools=definitions)
        return request, self._parser_class(self._tokenizer, request.tools, chat_template_kwargs=dict(variables))


def read_plain_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _make_message(
    reasoning: str | None, content: str | None, calls: Sequence[Any], text: str, number: int
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                # A call keeps an id that the model wrote. Ids that a parser draws at random are replaced by numbers, so
                # that a seed gives the same tokens again. Mistral's templates need nine letters and digits.
                "id": call.id if call.id and call.id in text else f"call{number:03d}{index:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]
    return message
