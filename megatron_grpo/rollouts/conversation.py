"""A rollout that an agent drives: its calls form one sequence, which keeps the tokens that were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.prompt_renderer import ChatMessage, PromptRenderer, are_text_parts, join_content
from megatron_grpo.rollouts.engine_client import EngineClient

OVER = "the rollout is over"


class BadCallError(ValueError):
    """A call without an answer; the message is for the agent."""


@dataclass(eq=False)
class Conversation:
    """The calls of one rollout, each continuing the previous one.

    The model's text is never tokenized again: the prompt of a call is all tokens so far, followed by the tokens of the
    text that the call adds.
    """

    engine: EngineClient
    settings: SamplingSettings
    renderer: PromptRenderer
    compute_seed: Callable[[int], int]  # from the number of a response
    max_length: int  # tokens of prompts and responses together

    def __post_init__(self) -> None:
        self.pieces: list[NDArray[np.int32]] = []  # context and sampled tokens, alternating, [tokens] each, int32
        self.outputs: list[GenerationOutput] = []
        self.failure: Exception | None = None  # the engine's in the last call; the agent learns only that it failed
        # The conversation so far in the form of the last call, messages or text; None: the call had token ids.
        self._history: list[ChatMessage] | str | None = None
        self._lock = asyncio.Lock()  # one call at a time, because each continues the last
        self._sampling: asyncio.Task[GenerationOutput] | None = None
        self._is_over = False

    @property
    def length(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def end(self) -> None:
        """End the rollout: cancel its call, and refuse further calls."""
        self._is_over = True
        if self._sampling is not None:
            self._sampling.cancel()

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] | None,
        max_tokens: int | None,
        variables: Mapping[str, Any] | None = None,
    ) -> GenerationOutput:
        """Sample the model's next message.

        `messages` are all so far, with the model's own unchanged. `tools` and `variables` for the chat template replace
        the task's. Raises BadCallError if the call does not continue the previous one, or leaves no room to answer.
        """
        async with self._lock:
            output = await self._sample(self._encode_messages(messages, tools, variables), max_tokens)
            self._history = [*messages, {"role": "assistant", "content": output.text}]
            return output

    async def complete(self, prompt: str | Sequence[int], max_tokens: int | None) -> GenerationOutput:
        """Sample the response to a text or token ids; raises as `chat`."""
        async with self._lock:
            output = await self._sample(self._encode_prompt(prompt), max_tokens)
            self._history = prompt + output.text if isinstance(prompt, str) else None
            return output

    def _encode_messages(
        self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] | None, variables: Mapping[str, Any] | None
    ) -> list[int]:
        renderer, history = self.renderer, self._history
        if not renderer.has_template:
            raise BadCallError("the model's tokenizer has no chat template; use /v1/completions")
        if self.outputs and not (isinstance(history, list) and _is_continuation(messages, history)):
            raise BadCallError(
                "does not continue the rollout's conversation: each call has to repeat all messages so far, the "
                "model's as they were answered, and add some; a rollout is trained on as one sequence"
            )
        try:
            if not self.outputs:
                return renderer.encode_rendered(renderer.render(messages, tools=tools, variables=variables))
            assert isinstance(history, list), "checked above"
            earlier, later = history[:-1], messages[len(history) :]
            return renderer.encode_continuation(earlier, later, self._last_token, tools=tools, variables=variables)
        except Exception as error:  # noqa: BLE001 - a template may raise anything about an agent's messages
            raise BadCallError(f"the chat template refuses these messages: {error}") from None

    @property
    def _last_token(self) -> int:
        return int(self.outputs[-1].token_ids[-1])

    def _encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if not self.outputs:
                return self._encode_text(self.renderer.encode_plain, prompt)
            if not isinstance(self._history, str) or not prompt.startswith(self._history):
                raise BadCallError("does not begin with the prompt and the response of the call before")
            return self._encode_text(self.renderer.encode_after, prompt[len(self._history) :], self._last_token)
        tokens = len(self.renderer.tokenizer)
        if any(not 0 <= token < tokens for token in prompt):
            raise BadCallError(f"has token ids outside the model's vocabulary of {tokens} tokens")
        history = np.concatenate(self.pieces).tolist() if self.pieces else []
        if list(prompt[: len(history)]) != history:
            raise BadCallError("does not begin with the tokens of the prompt and the response of the call before")
        return list(prompt[len(history) :])

    async def _sample(self, piece: list[int], max_tokens: int | None) -> GenerationOutput:
        if not piece and not self.outputs:
            raise BadCallError("the prompt is empty")
        context = np.array(piece, dtype=np.int32)
        room = self.max_length - self.length - len(context)
        if room < 1:
            limit = f"policy.max_total_sequence_length={self.max_length}"
            raise BadCallError(f"{self.length + len(context)} tokens leave no room within {limit}")
        request = GenerationRequest(
            prompt_ids=np.concatenate([*self.pieces, context]),
            seed=self.compute_seed(len(self.outputs)),
            max_new_tokens=room if max_tokens is None else min(max_tokens, room),
        )
        if self._is_over:
            raise BadCallError(OVER)
        self._sampling = asyncio.create_task(self.engine.generate(request, self.settings))
        try:
            output = await self._sampling
        except asyncio.CancelledError:
            # `end` cancels the sampling, not the agent's call, which still needs an answer.
            if self._is_over:
                raise BadCallError(OVER) from None
            raise
        except Exception as error:  # the rollout fails with this error even if the agent continues
            self.failure = error
            raise
        self.failure = None  # the agent, or its client, has repeated the call
        self.pieces += [context, output.token_ids]
        self.outputs.append(output)
        return output

    def _encode_text(self, encode: Callable[..., list[int]], *arguments: Any) -> list[int]:
        try:
            return encode(*arguments)
        except (TypeError, ValueError) as error:  # half a surrogate pair, which JSON allows
            raise BadCallError(f"the text cannot be tokenized: {error}") from None


def _is_continuation(messages: Sequence[ChatMessage], history: Sequence[ChatMessage]) -> bool:
    pairs = zip(messages, history, strict=False)
    is_repeated = all(_normalize(message) == _normalize(earlier) for message, earlier in pairs)
    return len(messages) > len(history) and is_repeated


def _normalize(message: ChatMessage) -> dict[str, Any]:
    # Clients send back empty fields that they received, and some make parts of a text.
    fields = {name: value for name, value in message.items() if value not in (None, [], "") or name == "content"}
    return fields | ({"content": join_content(fields["content"])} if are_text_parts(fields.get("content")) else {})
