"""A request and its response as vLLM's server has them: JSON, tokens in and tokens out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.trajectory import Span
from megatron_grpo.generation.vllm_requests import sampling_arguments

PATH = "/inference/v1/generate"

NO_NUMBER = -9999.0
"""What the server writes in the place of a log-probability that is NaN."""


def request_body(
    name: str, request: GenerationRequest, settings: SamplingSettings, longest: int, salt: str | None
) -> dict[str, Any]:
    """A request as the server takes it.

    Args:
        name: name of the request.
        request: the response to sample.
        settings: temperature, filters and stop conditions.
        longest: most tokens of prompt and response together.
        salt: what separates prompts that are cached under different weights; None: nothing has to.

    Raises:
        ValueError: the prompt leaves no room for a response.
    """
    arguments = {key: value for key, value in sampling_arguments(request, settings, longest).items() if value != []}
    body = {"request_id": name, "token_ids": request.prompt_ids.tolist(), "sampling_params": arguments}
    return body if salt is None else {**body, "cache_salt": salt}


class OtherWeightsError(Exception):
    """A response was sampled by weights that are not this run's."""


def read_response(
    answer: dict[str, Any], version_of: Callable[[str], int | None], decode: Callable[[list[int]], str]
) -> GenerationOutput | str:
    """The response in an answer of the server, or why there is none.

    Args:
        answer: the server's.
        version_of: number of the version that the server calls so; None: it is not this run's.
        decode: the text of tokens.

    Raises:
        OtherWeightsError: some token is of weights that are not this run's.
    """
    (choice,) = answer["choices"]
    if choice["finish_reason"] not in ("stop", "length"):
        return f"the server ended a request early: {choice['finish_reason']}"
    spans: list[Span] = []
    for one in choice["weight_versions"] or []:
        version = version_of(one["version"])
        if version is None:
            raise OtherWeightsError
        spans.append(Span(one["start"], one["end"], version))
    if not spans:
        raise OtherWeightsError
    token_ids = choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert [one["token_id"] for one in content] == token_ids, "one log-probability per sampled token"
    logprobs = [math.nan if one["logprob"] == NO_NUMBER else one["logprob"] for one in content]
    return GenerationOutput(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=decode(token_ids),
        stop_reason=choice["finish_reason"],
        spans=spans,
    )
