"""Reads tool calls and answers in gpt-oss' format (harmony), whose channels vLLM's own parser leaves to its server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
        except Exception as error:  # the library raises bare exceptions
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
