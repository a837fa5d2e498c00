"""A rollout that an agent drives: its calls form a tree of responses, which keeps the tokens that were sampled."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.chat_messages import ChatMessage
from megatron_grpo.data.omissions import find_omissions
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.rollouts.agent_messages import is_continuation, mark_turn
from megatron_grpo.rollouts.engine_client import EngineClient

OVER = "the rollout is over"
OPEN_CALLS = 64  # most responses of a rollout that are sampled at the same time

ReadMessage = Callable[[GenerationOutput, str, int], dict[str, Any]]
"""From a response, its text before a stop of the call, and its number, to the message that the agent gets."""


class BadCallError(ValueError):
    """A call without an answer; the message is for the agent."""


class TooManyCallsError(BadCallError):
    """A call beyond OPEN_CALLS."""


def read_plain_message(_: GenerationOutput, text: str, number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the first of a call's stops."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A sampled response, and its context since the response that it continues."""

    parent: Response | None  # the response that this one continues; None: its context is the whole prompt
    context: NDArray[np.int32]  # given tokens after the parent's: [tokens], int32
    output: GenerationOutput
    history: list[ChatMessage] | str | None = None  # conversation with the response; None: the call had token ids
    rendered: str = ""  # the rendered prompt before the model's turn; of a response that continues another, empty
    stop: tuple[str, ...] = ()  # texts that ended the call's responses, besides the run's

    @property
    def path(self) -> list[Response]:
        """The responses that lead to this one, which is the last."""
        path, step = [self], self.parent
        while step is not None:
            path.append(step)
            step = step.parent
        return path[::-1]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens so far, with the response: [tokens], int32."""
        return np.concatenate([piece for step in self.path for piece in (step.context, step.output.token_ids)])


@dataclass(frozen=True, slots=True)
class Segment:
    """A sequence to train on: context and sampled pieces, which alternate."""

    pieces: list[NDArray[np.int32]]  # [tokens] each, int32
    outputs: list[GenerationOutput]


@dataclass(frozen=True, slots=True)
class _Prompt:
    parent: Response | None
    context: list[int]
    history: list[ChatMessage] | str | None = None
    rendered: str = ""


@dataclass(eq=False)
class Conversation:
    """The calls of one rollout.

    A call that repeats the conversation up to a response continues it: its prompt is the tokens of that response and
    all before it, followed by the tokens of the text that the call adds. So the model's text is not tokenized again. A
    call that continues no response, or whose chat template leaves out what was sampled, begins with the template's
    rendering of its messages.
    """

    engine: EngineClient
    settings: SamplingSettings
    renderer: PromptRenderer
    compute_seed: Callable[[int], int]  # from the number of a response
    max_length: int  # tokens of a prompt and its response together

    def __post_init__(self) -> None:
        self.responses: list[Response] = []  # that the agent got, in this order
        # Failures of the engine by prompt, until the agent or its client has repeated the call with success.
        self._failures: dict[bytes, Exception] = {}
        self._sampling: set[asyncio.Task[GenerationOutput]] = set()
        self._free_numbers: list[int] = []  # of calls that failed, for their repetition: a heap
        self._calls = 0
        self._message_numbers = count()
        self._is_over = False

    @property
    def failure(self) -> Exception | None:
        """The engine's failure in a call that was not repeated."""
        return next(iter(self._failures.values()), None)

    @property
    def last(self) -> Response:
        """The response that the agent got last."""
        return self.responses[-1]

    def end(self) -> None:
        """End the rollout: cancel its calls, and refuse further calls."""
        self._is_over = True
        for task in self._sampling:
            task.cancel()

    def deliver(self, responses: Sequence[Response]) -> None:
        """Count responses, which are sent to the agent now."""
        self.responses += responses

    def discard(self, responses: Sequence[Response]) -> None:
        """Leave out responses whose sending failed."""
        self.responses = [response for response in self.responses if response not in responses]

    def list_segments(self) -> list[Segment]:
        """Divide the responses into sequences to train on.

        The first response that continues another one, in the order of delivery, extends its segment; every further
        one begins a segment, with all tokens before it as context. So each response is sampled in exactly one segment.
        """
        segments: list[Segment] = []
        by_last: dict[Response, Segment] = {}  # segments by their last response
        for response in self.responses:
            segment = None if response.parent is None else by_last.pop(response.parent, None)
            context = response.context
            if segment is None:
                segment = Segment([], [])
                segments.append(segment)
                context = context if response.parent is None else np.concatenate([response.parent.tokens, context])
            segment.pieces.extend([context, response.output.token_ids])
            segment.outputs.append(response.output)
            by_last[response] = segment
        return segments

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] | None = None,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        stop: Sequence[str] = (),
        read: ReadMessage = read_plain_message,
    ) -> Response:
        """Sample the model's next message, the last of the response's history.

        The response counts once it is delivered (`deliver`).

        `messages` are all so far. `tools` and `variables` for the chat template replace the task's. `stop`: texts that
        end the response, besides the run's; `read` makes the message. Raises BadCallError if the template refuses the
        messages, or they leave no room to answer.
        """
        prompt = self._encode_messages(messages, tools, variables)

        def extend(output: GenerationOutput) -> list[ChatMessage]:
            assert isinstance(prompt.history, list)
            return [*prompt.history, read(output, cut_at_stop(output.text, stop), next(self._message_numbers))]

        return await self._sample(prompt, max_tokens, stop, extend)

    async def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, *, stop: Sequence[str] = ()
    ) -> Response:
        """Sample the response to a text or token ids; raises as `chat`."""

        def extend(output: GenerationOutput) -> str | None:
            return prompt + output.text if isinstance(prompt, str) else None

        return await self._sample(self._encode_prompt(prompt), max_tokens, stop, extend)

    def _encode_messages(
        self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] | None, variables: Mapping[str, Any] | None
    ) -> _Prompt:
        renderer = self.renderer
        if not renderer.has_template:
            raise BadCallError("the model's tokenizer has no chat template; use /v1/completions")
        try:
            conversation = list(messages)
            for response, history in self._find_continued(messages):
                # The model's messages as they were answered: clients leave out reasoning, which the template may show.
                restored = [*history, *messages[len(history) :]]
                if conversation == list(messages):
                    conversation = restored
                if self._is_kept(response, restored, tools, variables):
                    self._require_shown(restored, tools, variables, after=len(history))
                    earlier, later = history[:-1], restored[len(history) :]
                    last_token = int(response.output.token_ids[-1])
                    context = renderer.encode_continuation(earlier, later, last_token, tools=tools, variables=variables)
                    return _Prompt(response, context, restored)
            self._require_shown(conversation, tools, variables)
            text = renderer.render_open(conversation, tools=tools, variables=variables)
            # Templates open the model's turn in a prompt otherwise than among earlier turns, as with empty thinking.
            closed = renderer.render(conversation, tools=tools, variables=variables, add_generation_prompt=False)
            pairs = takewhile(lambda pair: pair[0] == pair[1], zip(text, closed, strict=False))
            return _Prompt(None, renderer.encode_rendered(text), conversation, text[: len(list(pairs))])
        except BadCallError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything about an agent's messages
            raise BadCallError(f"the chat template refuses these messages: {error}") from None

    def _require_shown(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] | None,
        variables: Mapping[str, Any] | None,
        after: int = 0,
    ) -> None:
        """Require that the template shows messages and tools.

        The first `after` messages are not checked. Thoughts may be left out, as templates do in earlier turns.
        """
        omissions = find_omissions(self.renderer, messages, tools=tools, variables=variables)
        omissions = [part for part in omissions if not part.are_thoughts and not 0 < part.number <= after]
        if omissions:
            text = f"the chat template leaves out {', '.join(map(str, omissions))}, so the model would not see it"
            raise BadCallError(f"{text}; give a template that shows it in data.chat_template")

    def _find_continued(self, messages: Sequence[ChatMessage]) -> Iterator[tuple[Response, list[ChatMessage]]]:
        """Find responses that messages continue, longest and newest first, with histories."""
        chats = [(response, response.history) for response in reversed(self.responses)]
        # A message is cut before the call's stop, which the tokens still have, so it is not continued.
        lists = [
            (response, history)
            for response, history in chats
            if isinstance(history, list) and cut_at_stop(response.output.text, response.stop) == response.output.text
        ]
        for response, history in sorted(lists, key=lambda pair: -len(pair[1])):
            if is_continuation(messages, history):
                yield response, history

    def _is_kept(
        self,
        response: Response,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] | None,
        variables: Mapping[str, Any] | None,
    ) -> bool:
        """True if the template shows a response's path, behind the same prompt."""
        # A template may drop earlier thinking, or write the tools before the newest question. The model has to see what
        # the template writes. A mark in the place of each sampled text shows whether the template kept the text.
        marked, marks = list(messages), []
        for step in response.path:
            assert isinstance(step.history, list)
            index = len(step.history) - 1
            marked[index], mark = mark_turn(messages[index])
            marks.append(mark)
        try:
            text = self.renderer.render(marked, tools=tools, variables=variables)
        except Exception:  # noqa: BLE001 - some templates refuse calls beside a text, so nothing is known of them
            return True
        return text.startswith(response.path[0].rendered) and all(mark is None or mark in text for mark in marks)

    def _encode_prompt(self, prompt: str | Sequence[int]) -> _Prompt:
        if isinstance(prompt, str):
            texts = [(response.history, response) for response in self.responses if isinstance(response.history, str)]
            continued = [(text, response) for text, response in texts if prompt.startswith(text)]
            if not continued:
                return _Prompt(None, self._encode_text(self.renderer.encode_plain, prompt))
            text, response = max(continued, key=lambda pair: len(pair[0]))
            last_token = int(response.output.token_ids[-1])
            return _Prompt(response, self._encode_text(self.renderer.encode_after, prompt[len(text) :], last_token))
        tokens = len(self.renderer.tokenizer)
        if any(not 0 <= token < tokens for token in prompt):
            raise BadCallError(f"has token ids outside the model's vocabulary of {tokens} tokens")
        ids = np.array(prompt, dtype=np.int32)
        paths = [(response.tokens, response) for response in self.responses]
        begins = [pair for pair in paths if np.array_equal(ids[: len(pair[0])], pair[0])]
        if not begins:
            return _Prompt(None, list(prompt))
        path, response = max(begins, key=lambda pair: len(pair[0]))
        return _Prompt(response, list(prompt[len(path) :]))

    async def _sample(
        self, prompt: _Prompt, max_tokens: int | None, stop: Sequence[str], extend: Callable[[GenerationOutput], Any]
    ) -> Response:
        context = np.array(prompt.context, dtype=np.int32)
        ids = context if prompt.parent is None else np.concatenate([prompt.parent.tokens, context])
        if not len(ids):
            raise BadCallError("the prompt is empty")
        room = self.max_length - len(ids)
        if room < 1:
            limit = f"policy.max_total_sequence_length={self.max_length}"
            raise BadCallError(f"{len(ids)} tokens leave no room within {limit}")
        if self._is_over:
            raise BadCallError(OVER)
        if len(self._sampling) >= OPEN_CALLS:
            raise TooManyCallsError(f"{OPEN_CALLS} responses of the rollout are being sampled; wait for one of them")
        settings = replace(self.settings, stop_strings=(*self.settings.stop_strings, *stop)) if stop else self.settings
        output = await self._generate(ids, room if max_tokens is None else min(max_tokens, room), settings)
        return Response(prompt.parent, context, output, extend(output), prompt.rendered, tuple(stop))

    async def _generate(self, ids: NDArray[np.int32], max_tokens: int, settings: SamplingSettings) -> GenerationOutput:
        number = heapq.heappop(self._free_numbers) if self._free_numbers else self._calls
        self._calls = max(self._calls, number + 1)
        request = GenerationRequest(prompt_ids=ids, seed=self.compute_seed(number), max_new_tokens=max_tokens)
        task = asyncio.create_task(self.engine.generate(request, settings))
        self._sampling.add(task)
        try:
            output = await task
        except asyncio.CancelledError:
            # `end` cancels the sampling, not the agent's call, which still needs an answer.
            if self._is_over:
                raise BadCallError(OVER) from None
            task.cancel()
            heapq.heappush(self._free_numbers, number)
            raise
        except Exception as error:  # the rollout fails with this error even if the agent continues
            self._failures[ids.tobytes()] = error
            heapq.heappush(self._free_numbers, number)
            raise
        finally:
            self._sampling.discard(task)
        self._failures.pop(ids.tobytes(), None)
        return output

    def _encode_text(self, encode: Callable[..., list[int]], *arguments: Any) -> list[int]:
        try:
            return encode(*arguments)
        except (TypeError, ValueError) as error:  # half a surrogate pair, which JSON allows
            raise BadCallError(f"the text cannot be tokenized: {error}") from None
