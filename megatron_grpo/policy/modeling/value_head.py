"""Building this rank's part of the value model: the policy's model with a value head in place of the output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.build import build_model
from megatron_grpo.policy.modeling.decoder import DecoderModel


class ValueHead(torch.nn.Module):
    """A number for each token: hidden state times weight plus bias, in float32, equal on all tensor-parallel ranks.

    It is given whole hidden states, also with sequence parallelism (`DecoderModel.rows`): every rank computes all of
    the head and its gradient.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        placed = {"dtype": config.params_dtype, "device": current_platform().device}
        weight: Any = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **placed))
        bias: Any = torch.nn.Parameter(torch.zeros(1, **placed))
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden], any float type, to the value after each token: [rows], float32."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


def build_value_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> list[DecoderModel]:
    """The chunks of a rank's shard of the value model, the backbone's weights not yet set, the head's zero.

    The last chunk of the last pipeline stage ends in hidden states (`DecoderModel.rows`), which its `output_layer`
    makes values of: what is known after each token.

    Args:
        shape: sizes of the value model, from `as_value_model`.
        parallel: the layout that `initialize_parallel` was called with.
        precision: dtype of weights and activations.
        activation_checkpointing: recompute every layer in the backward pass.
        fields: of Megatron-Core's TransformerConfig (`transformer_fields`), in place of the defaults of `build_model`.
    """
    chunks = build_model(
        shape, parallel, precision=precision, activation_checkpointing=activation_checkpointing, fields=fields
    )
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config)
    return chunks
