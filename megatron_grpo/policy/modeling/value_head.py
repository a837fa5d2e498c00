"""Building this rank's part of the value model: the policy's model with a value head in place of the output layer."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.build import build_model
from megatron_grpo.policy.modeling.row_selection import select_rows


class ValueHead(torch.nn.Module):
    """A number for each token: hidden state times weight plus bias, in float32, equal on all tensor-parallel ranks.

    The hidden states are whole, also with sequence parallelism (`RowSelection`): every rank computes all of the head
    and its gradient.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        placed = {"dtype": config.params_dtype, "device": current_platform().device}
        weight: Any = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **placed))
        bias: Any = torch.nn.Parameter(torch.zeros(1, **placed))
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The value of every token, from its hidden state.

        Args:
            hidden: [length, sequences, hidden], any float type.

        Returns:
            [length, sequences, 1], float32; and None, as Megatron-Core's output layers return their bias.
        """
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def build_value_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool = False,
) -> GPTModel:
    """A rank's shard of the value model, the backbone's weights not yet set, the head's zero.

    On the last pipeline stage `model(token_ids, position_ids, None)` gives [sequences, length, 1], float32: at position
    t what is known after token t.

    Args:
        shape: sizes of the value model, from `as_value_model`.
        parallel: the layout that `initialize_parallel` was called with.
        precision: dtype of weights and activations.
        activation_checkpointing: recompute every layer in the backward pass.
    """
    model = build_model(shape, parallel, precision=precision, activation_checkpointing=activation_checkpointing)
    if model.post_process:
        model.output_layer = ValueHead(model.config)
        select_rows(model)
    return model
