"""OpenAI's protocol of chat completions and completions: calls that are valid, answers, and their streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.rollouts.call_forms import require_fields
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.conversation import Response, cut_at_stop

MODEL = "policy"  # name of the model in requests and answers

_SAMPLING_FIELDS = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
_COMMON_FIELDS = {*_SAMPLING_FIELDS, "model", "max_tokens", "n", "stream", "stream_options", "stop", "logprobs", "user"}
_TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
_TEMPLATE_FIELDS = {"chat_template_kwargs", "reasoning_effort"}
_IGNORED_FIELDS = {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
CHAT_FIELDS = frozenset(
    {*_COMMON_FIELDS, *_TOOL_FIELDS, *_TEMPLATE_FIELDS, *_IGNORED_FIELDS, "messages", "max_completion_tokens"}
    | {"top_logprobs", "response_format"}
)
COMPLETION_FIELDS = frozenset({*_COMMON_FIELDS, "prompt"})
RESPONSES_FIELDS = frozenset(
    {*_SAMPLING_FIELDS, *_TOOL_FIELDS, *_TEMPLATE_FIELDS, *_IGNORED_FIELDS, "model", "input", "instructions", "user"}
    | {"max_output_tokens", "previous_response_id", "stream", "reasoning", "text", "include", "truncation"}
)


DecodeToken = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options that chat completions, completions and responses share."""

    max_tokens: int | None
    choices: int
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage_chunk: bool


def read_options(call: Any, accepted: frozenset[str], settings: SamplingSettings) -> CallOptions:
    """Read a call's options; BadCallError if they are malformed, or sample differently."""
    fields = require_fields(call, accepted)
    for name in sorted(_SAMPLING_FIELDS & fields.keys()):
        value = getattr(settings, name)
        if fields[name] != value:
            raise BadCallError(f"{name}={fields[name]}: every call of this run has {value}; leave it out")
    limits = [name for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if name in fields]
    stop = fields.get("stop", [])
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    _require_obtainable(fields)
    limit = fields[limits[0]] if limits else None
    has_usage = bool(fields.get("stream_options", {}).get("include_usage"))
    return CallOptions(limit, fields.get("n", 1), stops, fields.get("stream", False), has_usage)


def _require_obtainable(fields: dict[str, Any]) -> None:
    logprobs = fields.get("logprobs")
    alternatives = fields.get("top_logprobs", 0), logprobs if type(logprobs) is int else 0
    if any(alternatives):
        text = (
            "only the sampled token's log-probability is known, which logprobs=true gives (logprobs=0 in completions)"
        )
        raise BadCallError(f"{'top_logprobs' if alternatives[0] else 'logprobs'}={max(alternatives)}: {text}")
    if fields.get("tool_choice", "auto") not in ("auto", "none"):
        text = "calls cannot be forced, since the run decides how responses are sampled; use auto or none"
        raise BadCallError(f"tool_choice={fields['tool_choice']}: {text}")
    if fields.get("parallel_tool_calls", True) is not True:
        raise BadCallError("parallel_tool_calls=false: the model decides how many tools it calls; leave it out")
    formats = fields.get("response_format"), fields.get("text", {}).get("format")
    for form in formats:
        if form is not None and form != {"type": "text"}:
            raise BadCallError("a form of responses is set for all rollouts by generation.structured")


def make_answer(responses: Sequence[Response], call: dict[str, Any], options: CallOptions, decode: DecodeToken) -> Any:
    """Make the answer to a call of chat completions or completions."""
    is_chat = "messages" in call
    make_choice = _make_chat_choice if is_chat else _make_text_choice
    choices = []
    for index, response in enumerate(responses):
        output = response.output
        choice = {"index": index, "finish_reason": output.stop_reason, "token_ids": output.token_ids.tolist()}
        choices.append({**choice, **make_choice(response, call, options, decode)})
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{time.time_ns()}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": count_usage(responses),
    }


def count_usage(responses: Sequence[Response]) -> dict[str, int]:
    sampled = sum(len(response.output.token_ids) for response in responses)
    prompt = len(responses[0].tokens) - len(responses[0].output.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _make_chat_choice(
    response: Response, call: dict[str, Any], options: CallOptions, decode: DecodeToken
) -> dict[str, Any]:
    assert isinstance(response.history, list)
    message = response.history[-1]
    choice: dict[str, Any] = {"message": message}
    if message.get("tool_calls") and response.output.stop_reason == "stop":
        choice["finish_reason"] = "tool_calls"
    if call.get("logprobs"):
        texts = map(decode, response.output.token_ids.tolist())
        pairs = zip(texts, response.output.logprobs.tolist(), strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in pairs
            ]
        }
    return choice


def _make_text_choice(
    response: Response, call: dict[str, Any], options: CallOptions, decode: DecodeToken
) -> dict[str, Any]:
    texts = [*map(decode, response.output.token_ids.tolist())]
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    logprobs = {"tokens": texts, "token_logprobs": response.output.logprobs.tolist(), "text_offset": offsets}
    return {"text": cut_at_stop(response.output.text, options.stop), "logprobs": {**logprobs, "top_logprobs": None}}


def iterate_chunks(answer: dict[str, Any], options: CallOptions) -> Iterator[dict[str, Any]]:
    """Divide an answer into the chunks of a stream."""
    is_chat = answer["object"] == "chat.completion"
    base = {**answer, "choices": [], "usage": None}
    del base["usage"]
    if is_chat:
        base["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        end = {name: choice[name] for name in ("index", "finish_reason", "token_ids")}
        if is_chat:
            logprobs = choice.get("logprobs")
            for delta in _iterate_deltas(choice["message"]):
                part = {"index": choice["index"], "delta": delta, "finish_reason": None}
                if logprobs is not None and "role" not in delta:
                    part["logprobs"], logprobs = logprobs, None
                yield {**base, "choices": [part]}
            yield {**base, "choices": [{**end, "delta": {}, **({"logprobs": logprobs} if logprobs else {})}]}
        else:
            yield {**base, "choices": [{**choice, "finish_reason": None}]}
            yield {**base, "choices": [{**end, "text": "", "logprobs": None}]}
    if options.has_usage_chunk:
        yield {**base, "usage": answer["usage"]}


def _iterate_deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    reasoning: dict[str, Any] = {name: message[name] for name in ("reasoning_content", "reasoning") if name in message}
    if reasoning:
        yield reasoning
    if message.get("content"):
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": function}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]}
