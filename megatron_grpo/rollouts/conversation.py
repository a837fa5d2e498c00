"""A rollout that an agent drives: its calls form a tree of responses, which keeps the tokens that were sampled."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.data.chat_messages import ChatMessage
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.rollouts.call_images import CallImages, list_images
from megatron_grpo.rollouts.call_prompts import BadCallError, Chat, SampledTurn, encode_chat, encode_text
from megatron_grpo.rollouts.call_texts import CallTexts, ReadMessage
from megatron_grpo.rollouts.engine_client import EngineClient

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

OVER = "the rollout is over"
OPEN_CALLS = 64  # most responses of a rollout that are sampled at the same time
# A call may have so many bytes, and more for every token of the context window: text has 3 to 9 for a token.
CALL_BYTES, TOKEN_BYTES = 2**16, 64
# Likewise of values of its JSON: a template writes at least a token for each, and those that it leaves out are few.
CALL_VALUES, TOKEN_VALUES = 2**12, 4


class TooManyCallsError(BadCallError):
    """A call beyond OPEN_CALLS."""


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
    images: Images = ()  # of the context, in the order of their placeholders

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

    @property
    def path_images(self) -> list[StoredImage]:
        """Images of all tokens so far, in order."""
        return [image for step in self.path for image in step.images]


@dataclass(frozen=True, slots=True)
class Segment:
    """A sequence to train on: context and sampled pieces, which alternate."""

    pieces: list[NDArray[np.int32]]  # [tokens] each, int32
    outputs: list[GenerationOutput]
    images: list[StoredImage] = field(default_factory=list)  # of all pieces, in the order of their placeholders


@dataclass(frozen=True, slots=True)
class _Prompt:
    parent: Response | None
    context: Sequence[int]
    history: list[ChatMessage] | str | None = None
    rendered: str = ""
    images: Images = ()  # of the context


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
    texts: CallTexts = field(default_factory=CallTexts)
    images: CallImages | None = None  # None: calls may have none

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()
        self._begun = 0  # calls that were sampled, also those that failed
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
        """Count responses, which are sent to the agent now.

        BadCallError: with them the rollout would have too many segments; none of them counts.
        """
        # Calls at the same time may all have begun while there was room for one of them.
        self._require_few_segments([*self.responses, *responses])
        self.responses += responses

    def discard(self, responses: Sequence[Response]) -> None:
        """Leave out responses whose sending failed, but for those that another one continues."""
        unread = {*responses} - {response.parent for response in self.responses}
        self.responses = [response for response in self.responses if response not in unread]

    def list_segments(self) -> list[Segment]:
        """Divide the responses into sequences to train on.

        The first response that continues another one, in the order of delivery, extends its segment; every further
        one begins a segment, with all tokens before it as context. So each response is sampled in exactly one segment.
        """
        segments: list[Segment] = []
        by_last: dict[Response, Segment] = {}  # segments by their last response
        for response in self.responses:
            segment = None if response.parent is None else by_last.pop(response.parent, None)
            context, images = response.context, response.images
            if segment is None:
                segment = Segment([], [])
                segments.append(segment)
                images = response.path_images
                context = context if response.parent is None else np.concatenate([response.parent.tokens, context])
            segment.pieces.extend([context, response.output.token_ids])
            segment.outputs.append(response.output)
            segment.images.extend(images)
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
        read: ReadMessage = CallTexts.read_plain,
    ) -> Response:
        """Sample the model's next message, the last of the response's history.

        The response counts once it is delivered (`deliver`).

        `messages` are all so far. `tools` and `variables` for the chat template replace the task's. `stop`: texts that
        end the response, besides the run's; `read` makes the message. Raises BadCallError if the template refuses the
        messages, or they leave no room to answer.
        """
        prompt = await self._encode_messages(Chat(messages, tools, variables))

        async def extend(output: GenerationOutput) -> list[ChatMessage]:
            assert isinstance(prompt.history, list)
            number = next(self._message_numbers)
            async with self._share_processes():
                return [*prompt.history, await read(output, cut_at_stop(output.text, stop), number)]

        return await self._sample(prompt, max_tokens, stop, extend)

    async def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, *, stop: Sequence[str] = ()
    ) -> Response:
        """Sample the response to a text or token ids; raises as `chat`."""

        async def extend(output: GenerationOutput) -> str | None:
            return prompt + output.text if isinstance(prompt, str) else None

        return await self._sample(await self._encode_prompt(prompt), max_tokens, stop, extend)

    async def store_images(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Store a call's images; BadCallError: one cannot be used."""
        if self.images is None:
            return messages  # the renderer refuses images
        async with self._share_processes():
            return await asyncio.to_thread(self.images.store, messages)

    def _fill_places(self, context: Sequence[int], images: Images = ()) -> Sequence[int]:
        return context if self.images is None else self.images.fill(context, images)

    async def _encode_messages(self, chat: Chat) -> _Prompt:
        if not self.renderer.has_template:
            raise BadCallError("the model's tokenizer has no chat template; use /v1/completions")
        self._require_short(count_characters((chat.messages, chat.tools)))
        responses = self.responses  # a copy is made when responses are discarded
        prompt = await self._encode(encode_chat, chat, list(_list_turns(responses, len(chat.messages))))
        history = list(chat.messages)
        if prompt.restored is not None:
            earlier = responses[prompt.restored].history
            assert isinstance(earlier, list)
            history = [*earlier, *history[len(earlier) :]]
        parent, later = None, history
        if prompt.parent is not None:
            parent = responses[prompt.parent]
            assert isinstance(parent.history, list)
            later = history[len(parent.history) :]
        images = list_images(later)
        return _Prompt(parent, self._fill_places(prompt.context, images), history, prompt.rendered, images)

    async def _encode_prompt(self, prompt: str | Sequence[int]) -> _Prompt:
        self._require_short(len(prompt))
        if isinstance(prompt, str):
            texts = [(response.history, response) for response in self.responses if isinstance(response.history, str)]
            continued = [(text, response) for text, response in texts if prompt.startswith(text)]
            if not continued:
                return _Prompt(None, self._fill_places(await self._encode(encode_text, prompt, None)))
            text, response = max(continued, key=lambda pair: len(pair[0]))
            last_token = int(response.output.token_ids[-1])
            context = await self._encode(encode_text, prompt[len(text) :], last_token)
            return _Prompt(response, self._fill_places(context))
        tokens = len(self.renderer.tokenizer)
        if any(not 0 <= token < tokens for token in prompt):
            raise BadCallError(f"has token ids outside the model's vocabulary of {tokens} tokens")
        ids = np.array(prompt, dtype=np.int32)
        ends = dict[Response, int]()
        for response in self.responses:
            _find_end(response, ids, ends)
        parent = max(self.responses, key=lambda response: ends[response], default=None)
        if parent is None or ends[parent] < 0:
            return _Prompt(None, self._fill_places(prompt))
        return _Prompt(parent, self._fill_places(prompt[ends[parent] :]))

    async def _encode(self, function: Callable[[PromptRenderer, *Arguments], Answer], *arguments: *Arguments) -> Answer:
        async with self._share_processes():
            return await self.texts.encode(function, self.renderer, *arguments)

    @asynccontextmanager
    async def _share_processes(self) -> AsyncIterator[None]:
        """Wait for the rollout's turn to have a text read."""
        async with self._reading:
            if self._is_over:
                raise BadCallError(OVER)
            yield

    @property
    def largest_call(self) -> int:
        """Most bytes of a call, from the context window."""
        return CALL_BYTES + TOKEN_BYTES * self.max_length

    @property
    def most_bytes(self) -> int:
        """Most bytes of a call with its images."""
        return self.largest_call + (0 if self.images is None else self.images.largest)

    @property
    def most_values(self) -> int:
        """Most values of a call's JSON, from the context window."""
        return CALL_VALUES + TOKEN_VALUES * self.max_length

    def _require_short(self, size: int) -> None:
        if size > self.largest_call:
            limit = f"policy.max_total_sequence_length={self.max_length}"
            raise BadCallError(f"{size} characters are too long for the context window ({limit})")

    def _require_room_for_response(self, parent: Response | None) -> None:
        """Require that the rollout may have a further response."""
        config = self.texts.config
        if self._begun >= config.max_calls:
            raise BadCallError(f"the rollout has had generation.endpoint.max_calls={config.max_calls} calls")
        if parent is None or any(response.parent is parent for response in self.responses):
            self._require_few_segments(self.responses, begun=len(self._sampling) + 1)

    def _require_few_segments(self, responses: Sequence[Response], begun: int = 0) -> None:
        # As `list_segments` divides them: a response that is continued shares its segment with the first that does so.
        continued = {response.parent for response in responses}.intersection(responses)
        max_segments = self.texts.config.max_segments
        if len(responses) - len(continued) + begun > max_segments:
            limit = f"generation.endpoint.max_segments={max_segments}"
            raise BadCallError(f"the rollout has {limit} conversations; continue one of them")

    async def _sample(
        self,
        prompt: _Prompt,
        max_tokens: int | None,
        stop: Sequence[str],
        extend: Callable[[GenerationOutput], Awaitable[Any]],
    ) -> Response:
        context = np.array(prompt.context, dtype=np.int32)
        ids = context if prompt.parent is None else np.concatenate([prompt.parent.tokens, context])
        images = [*([] if prompt.parent is None else prompt.parent.path_images), *prompt.images]
        if self.images is not None:
            self.images.require_few(images)
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
        self._require_room_for_response(prompt.parent)
        self._begun += 1
        settings = replace(self.settings, stop_strings=(*self.settings.stop_strings, *stop)) if stop else self.settings
        output = await self._generate(ids, images, room if max_tokens is None else min(max_tokens, room), settings)
        history = await extend(output)
        return Response(prompt.parent, context, output, history, prompt.rendered, tuple(stop), prompt.images)

    async def _generate(
        self, ids: NDArray[np.int32], images: list[StoredImage], max_tokens: int, settings: SamplingSettings
    ) -> GenerationOutput:
        number = heapq.heappop(self._free_numbers) if self._free_numbers else self._calls
        self._calls = max(self._calls, number + 1)
        request = GenerationRequest(
            prompt_ids=ids, seed=self.compute_seed(number), max_new_tokens=max_tokens, images=images
        )
        key = ids.tobytes() + "".join(image.digest for image in images).encode()
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
            self._failures[key] = error
            heapq.heappush(self._free_numbers, number)
            raise
        finally:
            self._sampling.discard(task)
        self._failures.pop(key, None)
        return output


def _find_end(response: Response, ids: NDArray[np.int32], ends: dict[Response, int]) -> int:
    """Find where a response ends in a prompt.

    -1: the prompt does not begin with its tokens. ends: of other responses, so that each token of a tree of responses
    is compared once.
    """
    if response not in ends:
        end = 0 if response.parent is None else _find_end(response.parent, ids, ends)
        for piece in (response.context, response.output.token_ids):
            if end >= 0:
                end = end + len(piece) if np.array_equal(ids[end : end + len(piece)], piece) else -1
        ends[response] = end
    return ends[response]


def count_characters(value: Any) -> int:
    """Count the characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(name)) + count_characters(part) for name, part in value.items())
    return sum(map(count_characters, value)) if isinstance(value, list | tuple) else 0


def _list_turns(responses: Sequence[Response], most_messages: int) -> Iterator[SampledTurn]:
    """List responses that a call of so many messages may continue, the newest first."""
    for number, response in reversed(list(enumerate(responses))):
        history = response.history
        # A message is cut before the call's stop, which the tokens still have, so it is not continued.
        is_whole = cut_at_stop(response.output.text, response.stop) == response.output.text
        if isinstance(history, list) and len(history) < most_messages and is_whole:
            path = response.path
            positions = tuple(len(step.history) - 1 for step in path if isinstance(step.history, list))
            yield SampledTurn(number, history, positions, path[0].rendered, int(response.output.token_ids[-1]))
