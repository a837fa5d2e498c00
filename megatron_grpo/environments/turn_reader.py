"""Reads tool calls of a response in a process with limits (`LimitedCalls`): with vLLM's parser, or that of gpt-oss.

In gpt-oss' format (harmony) vLLM's own parser leaves the channels to its server.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_grpo.config.errors import RunError

HARMONY_PARSER = "openai"  # vLLM's name of the parser
_RECIPIENT = "functions."


class HarmonyCalls:
    """Reads responses with the library of gpt-oss' authors."""

    def __init__(self) -> None:
        """Load the library's vocabulary; RunError: it is not here and cannot be downloaded."""
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        try:
            self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except Exception as error:  # Harmony's library raises `Exception` itself
            text = f"options.parser={HARMONY_PARSER}: openai_harmony cannot load its vocabulary: {error}"
            advice = "put o200k_base.tiktoken into a folder, and name that in TIKTOKEN_ENCODINGS_BASE"
            raise RunError(f"{text}; {advice}") from error

    def read(self, response: str) -> tuple[str, list[Any]]:
        """Read the text for the user, and the calls; malformed responses have none."""
        from openai_harmony import HarmonyError, Role

        # The library's own ids, so that a model with another vocabulary is read, too.
        ids = self._encoding.encode(response, allowed_special="all")
        try:
            messages = self._encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        except HarmonyError:
            return response, []
        texts = [(message.recipient or "", message.channel, message.content[0].text) for message in messages]
        calls = [
            SimpleNamespace(id=None, function=SimpleNamespace(name=recipient.removeprefix(_RECIPIENT), arguments=text))
            for recipient, _, text in texts
            if recipient.startswith(_RECIPIENT)
        ]
        return next((text for _, channel, text in reversed(texts) if channel == "final"), response), calls


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
