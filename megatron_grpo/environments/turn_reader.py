"""Reads tool calls of a response with vLLM's parser, in a process with limits (`LimitedCalls`)."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from megatron_grpo.config.errors import RunError
from megatron_grpo.environments.harmony_calls import HARMONY_PARSER, HarmonyCalls

PARSER_ADVICE = "give the parser of the model, by its name in vllm serve --tool-call-parser"


class ToolCall(NamedTuple):
    """A call that the model wrote; its arguments are JSON."""

    id: str | None
    name: str
    arguments: str


class TurnReader:
    """Reads the turns of one model."""

    def __init__(self, parser: str, tokenizer: Any) -> None:
        """Load the parser; RunError if it does not fit the tokenizer."""
        # Imported here: vLLM takes seconds to import, and only this process needs it.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs a traceback for every malformed call of a model
        self._harmony = HarmonyCalls() if parser == HARMONY_PARSER else None
        try:
            self._parser = ToolParserManager.get_tool_parser(parser)(tokenizer)
        except Exception as error:  # parsers raise anything about the vocabulary of another model
            text = f"options.parser={parser} does not fit the model's tokenizer: {error}; {PARSER_ADVICE}"
            raise RunError(text) from error
        self._request = ChatCompletionRequest(messages=[], model="")

    def read(self, response: str) -> tuple[str, list[ToolCall]]:
        """Read the text that may be the answer, and the tool calls."""
        if self._harmony is not None:
            text, calls = self._harmony.read(response)
        else:
            text, calls = response, self._parser.extract_tool_calls(response, self._request).tool_calls
        return text, [ToolCall(call.id, call.function.name, call.function.arguments) for call in calls]
