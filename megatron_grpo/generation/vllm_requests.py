"""A request and its response as vLLM has them, from and into what the rest of the system knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.data.responses import (
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    Structure,
    structure_of,
)
from megatron_grpo.data.trajectory import Span
from megatron_grpo.generation.routed_experts import chosen_experts
from megatron_grpo.generation.vllm_liveness import while_alive
from megatron_grpo.models.routed import RoutedForm

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


def sampling_params(request: GenerationRequest, settings: SamplingSettings, longest: int) -> SamplingParams:
    """A request as vLLM takes it; arguments and errors of `sampling_arguments`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = sampling_arguments(request, settings, longest)
    form = arguments.pop("structured_outputs", None)
    return SamplingParams(
        **arguments,
        structured_outputs=None if form is None else StructuredOutputsParams(**form),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def sampling_arguments(request: GenerationRequest, settings: SamplingSettings, longest: int) -> dict[str, Any]:
    """How a request is sampled, by vLLM's names, in types that JSON has; no two requests share a value.

    Args:
        request: the response to sample.
        settings: temperature, filters and stop conditions.
        longest: most tokens of prompt and response together.

    Raises:
        ValueError: the prompt leaves no room for a response.
    """
    room = longest - len(request.prompt_ids)
    max_tokens = min(request.max_new_tokens, settings.max_new_tokens, room)
    if max_tokens < 1:
        raise ValueError(
            f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response within "
            f"policy.max_total_sequence_length={longest}"
        )
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or 0,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "bad_words": list(settings.bad_words),
        **({} if settings.structure is None else {"structured_outputs": _form(settings.structure)}),
        "seed": request.seed,
        "max_tokens": max_tokens,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.stop_token_ids),
        "logprobs": 0,
        "detokenize": bool(settings.stop_strings),
    }


def _form(structure: Structure) -> dict[str, Any]:
    """The form of a response by vLLM's names."""
    choice = None if structure.choice is None else list(structure.choice)
    given = {"regex": structure.regex, "json": structure.json_schema, "choice": choice}
    return {name: value for name, value in given.items() if value is not None}


def warm_up_call(config: GenerationConfig) -> tuple[list[GenerationRequest], SamplingSettings]:
    """What an engine samples first, which allocates and compiles: a full batch, so that the first real one does not.

    With the structure of the real ones, so that vLLM says at the start what it cannot make of it.
    """
    settings = SamplingSettings(max_new_tokens=2, structure=structure_of(config.structured))
    request = GenerationRequest(prompt_ids=np.zeros(2, dtype=np.int32), seed=0, max_new_tokens=2)
    return [request] * config.sequences_per_engine, settings


async def responses(
    llm: AsyncLLM, finals: Mapping[int, RequestOutput], form: RoutedForm | None
) -> list[tuple[int, GenerationOutput | str]]:
    """The responses of finished requests, their texts without special tokens.

    Args:
        llm: the engine.
        finals: the last output of each request, by the request's number in its call.
        form: what the experts look like that each comes with; None: nobody asked.

    Returns:
        Each request's number, with its response or the reason why there is none.
    """
    outputs = list(finals.values())
    token_ids = [final.outputs[0].token_ids for final in outputs]
    texts = llm.get_tokenizer().batch_decode(token_ids, skip_special_tokens=True)
    routed: Sequence[NDArray[Any] | None] = [None] * len(outputs)
    if form is not None:
        routed = await while_alive(llm, chosen_experts(llm, outputs, form))
    answers = map(_response, outputs, texts, routed)
    return list(zip(finals, answers, strict=True))


def _response(final: RequestOutput, text: str, routed: NDArray[Any] | None) -> GenerationOutput | str:
    """A response, or why there is none; `routed`: [tokens, numbers of a token], the experts that it comes with."""
    completion = final.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return f"vLLM ended a request early: {completion.finish_reason}"
    logprobs = completion.logprobs.logprobs
    spans = completion.weight_versions or []
    assert len(logprobs) == len(completion.token_ids), "one log-probability per sampled token"
    assert spans, "every token has a version"
    return GenerationOutput(
        token_ids=np.array(completion.token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=text,
        stop_reason=completion.finish_reason,
        spans=[Span(span.start, span.end, int(span.version)) for span in spans],
        routed=routed,
    )
