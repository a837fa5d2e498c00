"""Requests and responses in vLLM's types, and answers of its workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.special_tokens import decode_response
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.models.routed_experts import RoutedForm

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

    from megatron_grpo.models.adapter_slot import AdapterSlot

Result = TypeVar("Result")

PACE_S = 0.02  # a complete response waits this long for others, so that one message carries them

# Fields of SamplingSettings that have the same name in vLLM.
_SAME_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


async def iterate_finished(pending: dict[asyncio.Task[Result], int]) -> AsyncIterator[dict[int, asyncio.Task[Result]]]:
    """Remove finished tasks from `pending`, and yield them by number, together within PACE_S."""
    while pending:
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finished, _ = await asyncio.wait(pending, timeout=PACE_S)
        yield dict(sorted((pending.pop(task), task) for task in finished))


def require_answers(answers: Sequence[Any], prefix: str = "") -> list[Any]:
    """Return workers' answers; RuntimeError if some are texts, which are errors."""
    errors = [f"{prefix}{answer}" for answer in answers if isinstance(answer, str)]
    if errors:
        raise RuntimeError("; ".join(errors))
    return list(answers)


def make_adapter_request(adapter: AdapterSlot | None) -> LoRARequest | None:
    """Name an adapter that a refit has put into its slot."""
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    # The path, which vLLM requires, would be read only for an adapter that no slot has.
    return LoRARequest(adapter.name, adapter.number, lora_path="sent by refits")


def make_sampling_params(request: GenerationRequest, settings: SamplingSettings, max_length: int) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = make_sampling_arguments(request, settings, max_length)
    structure = arguments.pop("structured_outputs", None)
    return SamplingParams(
        **arguments,
        structured_outputs=None if structure is None else StructuredOutputsParams(**structure),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def make_sampling_arguments(request: GenerationRequest, settings: SamplingSettings, max_length: int) -> dict[str, Any]:
    """Convert a request to vLLM's sampling parameters, in JSON types.

    Mutable values are made anew for each request. Raises ValueError if the prompt leaves no room for a response within
    `max_length`.
    """
    room = max_length - len(request.prompt_ids)
    max_tokens = min(request.max_new_tokens, settings.max_new_tokens, room)
    if max_tokens < 1:
        raise ValueError(
            f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response within "
            f"policy.max_total_sequence_length={max_length}"
        )
    arguments = {
        **{name: getattr(settings, name) for name in _SAME_NAMES},
        "top_k": settings.top_k or 0,
        "bad_words": list(settings.bad_words),
        "seed": request.seed,
        "max_tokens": max_tokens,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.stop_token_ids),
        "logprobs": 0,
        "detokenize": bool(settings.stop_strings),
        "skip_special_tokens": False,  # stop strings may contain special tokens
    }
    structured = settings.structured
    choice = None if structured.choice is None else list(structured.choice)
    options = {"regex": structured.regex, "json": structured.json_schema, "choice": choice}
    structure = {name: value for name, value in options.items() if value is not None}
    return {**arguments, "structured_outputs": structure} if structure else arguments


def describe_settings(config: VllmConfig) -> dict[str, Any]:
    """Describe the settings that decide log-probabilities, in JSON types.

    "model" is the configuration of the text model, by transformers' names; the others have vLLM's names.
    """
    model = config.model_config
    settings = {
        "model": model.hf_text_config.to_dict(),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "max_model_len": model.max_model_len,
        "logprobs_mode": model.logprobs_mode,
    }
    json_settings: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return json_settings


def make_responses(
    outputs: Mapping[int, RequestOutput], form: RoutedForm | None, tokenizer: Any
) -> list[tuple[int, GenerationOutput | str]]:
    """Convert finished requests, by index, to responses or reasons for none."""
    return [(index, _make_response(output, form, tokenizer)) for index, output in outputs.items()]


def pack_experts(form: RoutedForm, chosen: NDArray[np.integer] | None, tokens: int) -> NDArray[np.uint8] | str:
    """Pack the experts of a sequence, or say why they are incomplete.

    `chosen`: as vLLM reports them, None: not at all; `tokens`: of prompt and response.
    """
    rows = 0 if chosen is None else len(chosen)
    if chosen is None or rows != tokens - 1:
        return f"vLLM recorded the experts of {rows} tokens, and {tokens - 1} were processed"
    return form.from_engine(chosen)


def _make_response(output: RequestOutput, form: RoutedForm | None, tokenizer: Any) -> GenerationOutput | str:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return f"vLLM ended a request early: {completion.finish_reason}"
    routed: NDArray[np.uint8] | str | None = None
    if form is not None:
        tokens = len(output.prompt_token_ids or ()) + len(completion.token_ids)
        routed = pack_experts(form, completion.routed_experts, tokens)
    if isinstance(routed, str):
        return routed
    logprobs = completion.logprobs.logprobs
    spans = completion.weight_versions or []
    assert len(logprobs) == len(completion.token_ids), "one log-probability per sampled token"
    assert spans, "every token has a version"
    return GenerationOutput(
        token_ids=np.array(completion.token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=decode_response(tokenizer, completion.token_ids, completion.finish_reason),
        stop_reason=completion.finish_reason,
        spans=[Span(span.start, span.end, int(span.version)) for span in spans],
        routed=routed,
    )
