"""A rollout whose turns an agent makes: its calls become one sequence, of tokens as they were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.sampler.engines import EngineClient

ChatMessage = Mapping[str, Any]

OVER = "the rollout is over"
HERE = "\u2402\u2403here\u2403\u2402"
"""Stands for the model's last message where a template is rendered, so that its own text is not."""


class BadCallError(ValueError):
    """A call that cannot be answered in this rollout; its text is for the agent."""


class Conversation:
    """The calls of one rollout, each of which continues the one before.

    What the model wrote is never put into tokens again: a call's prompt is all tokens so far, and behind them those of
    what the call adds.
    """

    def __init__(
        self, engine: EngineClient, settings: SamplingSettings, tokenizer: Any, seed: Callable[[int], int], longest: int
    ) -> None:
        """
        Args:
            engine: samples the responses.
            settings: how tokens are drawn.
            tokenizer: tokenizer of the model, as transformers has it.
            seed: seed of the response with this number.
            longest: most tokens of prompts and responses together.
        """
        self.pieces: list[NDArray[np.int32]] = []
        """Given and sampled tokens in turns, [tokens] each, int32."""
        self.outputs: list[GenerationOutput] = []
        self.failure: Exception | None = None
        """The engine's error over the last call: the agent learns only that its call failed."""
        self.settings = settings
        self._engine, self._tokenizer = engine, tokenizer
        self._seed, self._longest = seed, longest
        self._known: list[ChatMessage] | str | None = None
        """The conversation as messages or as text, in the form of the last call; None: that was of tokens."""
        self._one_at_a_time = asyncio.Lock()
        self._asking: asyncio.Task[GenerationOutput] | None = None
        self._over = False

    @property
    def length(self) -> int:
        """Tokens so far."""
        return sum(len(piece) for piece in self.pieces)

    def end(self) -> None:
        """From here on nothing is answered; a call under way is given up."""
        self._over = True
        if self._asking is not None:
            self._asking.cancel()

    async def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] | None, max_tokens: int | None
    ) -> GenerationOutput:
        """The model's next message.

        Args:
            messages: the whole conversation, the model's own messages as they were answered.
            tools: tools for the chat template.
            max_tokens: most tokens of the answer; None: as many as the run allows.

        Raises:
            BadCallError: the call does not continue the one before, or there is no room.
        """
        async with self._one_at_a_time:
            output = await self._sample(self._chat_piece(messages, tools), max_tokens)
            self._known = [*messages, {"role": "assistant", "content": output.text}]
            return output

    async def complete(self, prompt: str | Sequence[int], max_tokens: int | None) -> GenerationOutput:
        """The response to a text or to tokens, which in later calls are everything before and an addition.

        Raises:
            BadCallError: the call does not continue the one before, or there is no room.
        """
        async with self._one_at_a_time:
            output = await self._sample(self._completion_piece(prompt), max_tokens)
            self._known = prompt + output.text if isinstance(prompt, str) else None
            return output

    def _chat_piece(self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] | None) -> list[int]:
        if not self.outputs:
            return self._ids(self._render(messages, tools))
        known = self._known
        if not isinstance(known, list) or not _continues(messages, known):
            raise BadCallError(
                "does not continue the rollout's conversation: each call has to repeat all messages so far, the "
                "model's as they were answered, and add some; a rollout is trained on as one sequence"
            )
        asked = [*known[:-1], {"role": "assistant", "content": HERE}, *messages[len(known) :]]
        _, found, rest = self._render(asked, tools).rpartition(HERE)
        if not found:
            raise BadCallError("the chat template leaves out the model's last message")
        return self._ids(self._without_end(rest))

    def _completion_piece(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if not self.outputs:
                return self._ids(prompt, special=True)
            if not isinstance(self._known, str) or not prompt.startswith(self._known):
                raise BadCallError("does not begin with the prompt and the response of the call before")
            return self._ids(self._without_end(prompt[len(self._known) :]))
        if any(not 0 <= token < len(self._tokenizer) for token in prompt):
            raise BadCallError(f"holds numbers that are none of the model's {len(self._tokenizer)} tokens")
        known = np.concatenate(self.pieces).tolist() if self.pieces else []
        if list(prompt[: len(known)]) != known:
            raise BadCallError("does not begin with the tokens of the prompt and the response of the call before")
        return list(prompt[len(known) :])

    async def _sample(self, piece: list[int], max_tokens: int | None) -> GenerationOutput:
        if not piece and not self.outputs:
            raise BadCallError("the prompt is empty")
        given = np.array(piece, dtype=np.int32)
        room = self._longest - self.length - len(given)
        if room < 1:
            raise BadCallError(
                f"{self.length + len(given)} tokens leave no room within policy.max_total_sequence_length="
                f"{self._longest}"
            )
        request = GenerationRequest(
            prompt_ids=np.concatenate([*self.pieces, given]),
            seed=self._seed(len(self.outputs)),
            max_new_tokens=room if max_tokens is None else min(max_tokens, room),
        )
        if self._over:
            raise BadCallError(OVER)
        self._asking = asyncio.create_task(self._engine.generate(request, self.settings))
        try:
            output = await self._asking
        except asyncio.CancelledError:
            if self._over:
                raise BadCallError(OVER) from None
            raise
        except Exception as error:  # the rollout fails with it, even if the agent goes on
            self.failure = error
            raise
        self.failure = None  # the agent, or its client, has asked again
        self.pieces += [given, output.token_ids]
        self.outputs.append(output)
        return output

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] | None) -> str:
        if not self._tokenizer.chat_template:
            raise BadCallError("the model's tokenizer has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # noqa: BLE001 - whatever a template raises about an agent's messages
            raise BadCallError(f"the chat template refuses these messages: {error}") from None
        return text

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text; `special`: with those that the tokenizer puts before any text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _without_end(self, rest: str) -> str:
        """What follows a message, less the token that ends it if the model has sampled that itself."""
        end = [int(token) for token in self.outputs[-1].token_ids[-1:]]
        if self._tokenizer.decode(end, skip_special_tokens=True):
            return rest  # an ordinary token, which is in the message
        return rest.removeprefix(self._tokenizer.decode(end))


def _continues(messages: Sequence[ChatMessage], known: Sequence[ChatMessage]) -> bool:
    """Whether messages begin with those that are known, and add some."""
    same = all(_said(one) == _said(other) for one, other in zip(messages, known, strict=False))
    return len(messages) > len(known) and same


def _said(message: ChatMessage) -> dict[str, Any]:
    """What is set in a message: clients send back fields that they were given empty."""
    return {name: value for name, value in message.items() if value not in (None, [], "") or name == "content"}
