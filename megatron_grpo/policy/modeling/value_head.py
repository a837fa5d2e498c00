"""Building this rank's part of the value model: the policy's model with a value head in place of the output layer."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.build import build_model


class ValueHead(torch.nn.Module):
    """A number for each token: hidden state times weight plus bias, in float32, equal on all tensor-parallel ranks.

    With sequence parallelism a rank has the hidden states of its part of the sequence only. It computes their values,
    which are then gathered; weight and bias get their gradient from that part, and their mark makes Megatron-Core add
    the parts up, as for a norm.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        placed = {"dtype": config.params_dtype, "device": current_platform().device}
        weight: Any = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **placed))
        bias: Any = torch.nn.Parameter(torch.zeros(1, **placed))
        weight.sequence_parallel = bias.sequence_parallel = config.sequence_parallel
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The value of every token, from its hidden state.

        Args:
            hidden: [length of this rank's part, sequences, hidden], any float type.

        Returns:
            [length, sequences, 1], float32; and None, as Megatron-Core's output layers return their bias.
        """
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every rank computes the whole loss: its gradient is complete, so it takes its part and nothing is summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


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
    return model


def token_values(output: Tensor) -> Tensor:
    """[sequences, length, 1], float32, to [sequences, length]: position t is the value before token t; 0 at the first.

    A value before a token is the value of the state in which token t is chosen: of the tokens before it.
    """
    return F.pad(output[:, :-1, 0], (1, 0))
