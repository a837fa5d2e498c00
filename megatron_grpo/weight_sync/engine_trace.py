"""Runs in an engine's worker: traces the loaders of its model, which may have converted its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_grpo.weight_sync.engine_layers import RebuiltLayer, is_derived
from megatron_grpo.weight_sync.weight_trace import WeightTrace, trace_weights


def trace_model(model: nn.Module, tensors: Mapping[str, Sequence[int]], dtype: torch.dtype) -> WeightTrace:
    """Trace the loading of a model's tensors; the model is unchanged afterwards.

    `tensors`: shapes by name; `dtype`: of the tensors. vLLM's configuration has to be set (`set_current_vllm_config`).
    """
    from vllm.model_executor.model_loader.reload import layerwise

    layers = [RebuiltLayer(layer) for layer in model.modules() if is_derived(layer)]
    try:
        for layer in layers:
            for parameter in layer.restore_plain().parameters(recurse=False):
                parameter.weight_loader = layerwise._get_original_loader(parameter)  # quantisation may have wrapped it
        return trace_weights(model, {name: (tuple(shape), dtype) for name, shape in tensors.items()})
    finally:
        for layer in layers:
            layer.abandon()
