"""How an engine is told to record which experts tokens go through, and where what it recorded comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.models.routed import UNKNOWN, RoutedForm
from megatron_grpo.platform.device import current_platform

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

RECORD_ROUTING = "megatron_grpo_record_routing"
"""Key of vLLM's additional_config in which workers of a CPU engine are told to record."""


def recording_arguments() -> dict[str, Any]:
    """vLLM's arguments for an engine that records.

    vLLM itself records on GPUs. On a CPU its workers do, which are ours (`PipelineCPUWorker`).
    """
    if current_platform().name == "cpu":
        return {"additional_config": {RECORD_ROUTING: True}}
    return {"enable_return_routed_experts": True}


async def chosen_experts(llm: AsyncLLM, finals: Sequence[RequestOutput], form: RoutedForm) -> list[NDArray[Any]]:
    """The experts that the tokens of finished requests went through.

    Args:
        llm: the engine.
        finals: the last output of each request.
        form: what the experts look like.

    Returns:
        For each request, [prompt and response tokens but the last, numbers of a token], in that form.
    """
    tokens = [len(final.prompt_token_ids or ()) + len(final.outputs[0].token_ids) for final in finals]
    if current_platform().name != "cpu":
        # A request that was aborted before its first token has none.
        found = [final.outputs[0].routed_experts for final in finals]
        return [form.laid_end_to_end([]) if one is None else form.from_engine(one) for one in found]
    names = [final.request_id for final in finals]
    stages = await llm.collective_rpc("take_routing", args=(names,))
    merged = []
    for name, count in zip(names, tokens, strict=True):
        by_layer = {layer: data for stage in stages for layer, data in stage.get(name, {}).items()}
        # A stop string is found after the fact: the engine may have gone further by then.
        whole = np.full((max(count - 1, 0), form.layers[-1] + 1, form.top_k), UNKNOWN, dtype=np.int16)
        for layer, data in by_layer.items():
            rows = np.frombuffer(data, dtype=np.int16).reshape(-1, form.top_k)
            whole[: len(rows), layer] = rows[: len(whole)]
        merged.append(form.from_engine(whole))
    return merged
