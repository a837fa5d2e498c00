"""Scaled rotary embeddings as transformers computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.models.shape import ModelShape


def scaled_rope_frequencies(shape: ModelShape) -> Tensor:
    """Inverse frequencies of a model whose rotary embeddings are scaled: [head_dim / 2], float32."""
    return _frequencies_and_factor(shape)[0].float()


def rope_factor(shape: ModelShape) -> float:
    """What a model's rotated vectors are multiplied by (YaRN); 1 for those whose embeddings are not scaled."""
    return 1.0 if shape.rope_scaling is None else _frequencies_and_factor(shape)[1]


def _frequencies_and_factor(shape: ModelShape) -> tuple[Tensor, float]:
    # Imported here because it takes seconds and only models with scaled frequencies need it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert shape.rope_scaling is not None
    scaling = {**shape.rope_scaling, "rope_theta": shape.rope_theta}
    rope_type = scaling.get("rope_type") or scaling.get("type")
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={**scaling, "rope_type": rope_type},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies, float(factor)
