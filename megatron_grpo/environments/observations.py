"""What an environment says between two turns of the model, in the tokens that are appended to the sequence."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.environments.settings import EnvironmentSettings

_SAID = "<<said by the model>>"
"""Stands for the model's turn while the chat template is asked for what comes after it."""


class Observations:
    """Makes tokens of an environment's texts. The model's own turns stay the tokens that were sampled."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings

    @cached_property
    def _tokenizer(self) -> Any:
        return self._settings.load_tokenizer()

    def tokens(self, text: str, role: str, last_token: int) -> NDArray[np.int32]:
        """[tokens], int32: what follows a turn of the model, so that it can take the next one.

        Without a chat template that is the text. With one it is all that the template puts between the model's words
        and its next turn: the end of its message, the message with the text, the beginning of its next message. Where
        the end of its message was sampled already, as the stop token, it is not repeated.

        Args:
            text: what the environment says.
            role: whose message it is.
            last_token: the last token of the model's turn.
        """
        between = self._between(text, role) if self._settings.apply_chat_template else text
        ids: list[int] = self._tokenizer(between, add_special_tokens=False)["input_ids"]
        if self._settings.apply_chat_template and ids and ids[0] == last_token:
            ids = ids[1:]
        return np.array(ids, dtype=np.int32)

    def _between(self, text: str, role: str) -> str:
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SAID}]
        messages.append({"role": role, "content": text})
        rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        _, found, after = rendered.rpartition(_SAID)
        if not found:
            raise ValueError("the tokenizer's chat template does not show what the model says")
        return after
