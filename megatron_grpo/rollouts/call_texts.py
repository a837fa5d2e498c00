"""Runs templates, tokenizers and vLLM's parsers on the texts of agents and models, with limits of time and memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationOutput
from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import EndpointConfig
from megatron_grpo.config.outside_text import clean_json
from megatron_grpo.data.chat_messages import ChatMessage
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.rollouts.call_prompts import BadCallError

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

_HARMONY = {"openai", "openai_gptoss"}  # parsers of gpt-oss, which vLLM replaces by one that reads its channels


class TextReader:
    """Tokenizer, renderers and vLLM's parsers, which calls need.

    Made once: vLLM takes seconds to import.
    """

    def __init__(
        self, tokenizer: Any = None, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        """Load tokenizer and parsers; SamplingError if they do not fit."""
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._renderers: dict[str, PromptRenderer] = {}
        self._parser_class: Any = None
        if tool_parser is None and reasoning_parser is None:
            return
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs a traceback for every malformed call of a model
        self._request_class = ChatCompletionRequest
        self._parsed_tokenizer = get_cached_tokenizer(self._tokenizer)
        try:
            self._parser_class = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                is_harmony=bool({tool_parser, reasoning_parser} & _HARMONY),
            )
            self._prepare_parser([], {})
        except Exception as error:  # parsers raise anything about the vocabulary of another model
            keys = f"tool_parser={tool_parser} and reasoning_parser={reasoning_parser}"
            text = f"generation.endpoint: {keys} do not fit the model's tokenizer: {error}"
            raise SamplingError(f"{text}; give the model's, by their names in vllm serve") from error

    def encode(self, function: Callable[..., Answer], prompts: PromptFormat, arguments: tuple[Any, ...]) -> Answer:
        """Call a function of `call_prompts.py` with the renderer of a task."""
        renderer = self._renderers.setdefault(repr(prompts), PromptRenderer(self._tokenizer, prompts))
        return function(renderer, *arguments)

    def check_tools(self, tools: Sequence[ChatMessage] | None, variables: Mapping[str, Any]) -> None:
        """Raise BadCallError about malformed tools."""
        try:
            self._prepare_parser(tools or [], variables)
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
        request, parser = self._prepare_parser(tools or [], variables)  # parsers have the state of one response
        try:
            parsed = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=token_ids.tolist())
            reasoning, content, calls = parsed
        except Exception:  # noqa: BLE001 - parsers raise anything about malformed responses
            return read_plain_message(text)
        message: dict[str, Any] = clean_json(_make_message(reasoning, content, calls or [], text, number))
        return message

    def _prepare_parser(self, tools: Sequence[ChatMessage], variables: Mapping[str, Any]) -> tuple[Any, Any]:
        definitions = [dict(tool) for tool in tools] or None
        request = self._request_class(messages=[{"role": "user", "content": "."}], model="", tools=definitions)
        return request, self._parser_class(self._parsed_tokenizer, request.tools, chat_template_kwargs=dict(variables))


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


ReadMessage = Callable[[GenerationOutput, str, int], Awaitable[dict[str, Any]]]
"""From a response, its text before a stop of the call, and its number, to the message that the agent gets."""

PROCESSES = 4  # most texts that a rollout worker reads at the same time
logger = logging.getLogger(__name__)


class CallTexts:
    """Reads the texts of calls; without `start` in this process, without limits.

    Every text goes through the processes, however short: no simple rule tells which are harmless, because vLLM's
    parsers are cubic on repeated marks of calls, and templates are programs.
    """

    def __init__(self, config: EndpointConfig | None = None) -> None:
        self.config = config or EndpointConfig()
        self.reader = TextReader()
        self._calls: LimitedCalls | None = None

    async def start(self, tokenizer: Any, *, limited: bool) -> None:
        """Load parsers, in processes if `limited`; SamplingError if they do not fit."""
        config = self.config
        make = partial(TextReader, tokenizer, config.tool_parser, config.reasoning_parser)
        if limited:
            start = partial(LimitedCalls, make, cpu_s=config.text_cpu_s, memory_mib=config.text_memory_mib)
            self._calls = await asyncio.to_thread(partial(start, processes=PROCESSES))
        else:
            self.reader = await asyncio.to_thread(make)

    async def encode(
        self,
        function: Callable[[PromptRenderer, *Arguments], Answer],
        renderer: PromptRenderer,
        *arguments: *Arguments,
    ) -> Answer:
        """Call a function of `call_prompts.py`; BadCallError beyond a limit."""
        if self._calls is None:
            return function(renderer, *arguments)
        try:
            return await self._calls.run(TextReader.encode, function, renderer.format, arguments)
        except LimitError as error:
            raise BadCallError(f"rendering the call {error} ({self._keys})") from None

    async def prepare(self, tools: Sequence[ChatMessage] | None, variables: Mapping[str, Any]) -> ReadMessage:
        """Prepare to read a call's responses; BadCallError about malformed tools."""
        if not (self.config.tool_parser or self.config.reasoning_parser):
            return self.read_plain
        try:
            await self._run(TextReader.check_tools, tools, variables)
        except LimitError as error:
            raise BadCallError(f"reading the tools of the call {error} ({self._keys})") from None

        async def read(output: GenerationOutput, text: str, number: int) -> dict[str, Any]:
            try:
                return await self._run(TextReader.read, tools, variables, output.token_ids, text, number)
            except LimitError as error:
                # The model's own text, so it counts as one with malformed calls.
                logger.warning("reading the calls of a response of %d characters %s (%s)", len(text), error, self._keys)
                return read_plain_message(text)

        return read

    @staticmethod
    async def read_plain(_: GenerationOutput, text: str, number: int) -> dict[str, Any]:
        return read_plain_message(text)

    async def _run(self, method: Callable[[TextReader, *Arguments], Answer], *arguments: *Arguments) -> Answer:
        return method(self.reader, *arguments) if self._calls is None else await self._calls.run(method, *arguments)

    @property
    def _keys(self) -> str:
        return "generation.endpoint.text_cpu_s and text_memory_mib"

    def close(self) -> None:
        """End the processes."""
        if self._calls is not None:
            self._calls.close()
