"""A request and its response as vLLM has them, from and into what the rest of the system knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings, Structure
from megatron_grpo.data.trajectory import Span

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


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


def responses(
    finals: Mapping[int, RequestOutput], texts: Sequence[str], routed: Mapping[int, NDArray[Any]]
) -> list[tuple[int, GenerationOutput | str]]:
    """The responses of finished requests.

    Args:
        finals: the last output of each request, by the request's number in its call.
        texts: the text of each, in the same order.
        routed: by number, [prompt and response tokens but the last, numbers of a token]; empty: nobody asked.

    Returns:
        Each request's number, with its response or the reason why there is none.
    """
    return [
        (index, _response(final, text, routed.get(index)))
        for (index, final), text in zip(finals.items(), texts, strict=True)
    ]


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
