"""The decoder of a pipeline stage, which ends in hidden states of chosen tokens, and the head of a value model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.platform.device import current_platform


class DecoderModel(GPTModel):
    """Megatron-Core's model without its head, which `PolicyRank` or `ValueHead` applies to chosen tokens alone.

    The head is the largest matrix of a small model, and its output the largest tensor of any model. So prompts and
    padding never reach it, and logits of all tokens are never held.
    """

    rows: Tensor | None = None
    """[rows], int64: indices of the chosen tokens of the next microbatch, [1, tokens]; None: the model returns logits
    of every token, [sequences, length, columns of this rank]."""

    def _postprocess(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[length, 1, hidden] of hidden states to those of the rows, [1, rows, hidden], on the last stage."""
        if not self.post_process or self.rows is None:
            output: Tensor = super()._postprocess(hidden_states, *arguments, **keywords)
            return output
        assert hidden_states.shape[1] == 1, "rows index packed sequences"
        hidden = hidden_states
        if self.config.sequence_parallel:
            # Every rank gets the complete gradient of the rows from the head, so backward only slices out its tokens.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[self.rows].transpose(0, 1)

    @property
    def head_weight(self) -> Tensor:
        """[columns of this rank, hidden]: a row for each vocabulary entry, padding included."""
        weight: Tensor | None = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self.output_layer.weight if weight is None else weight


class ValueHead(torch.nn.Module):
    """A number for each token: hidden state times weight plus bias, in float32, equal on all tensor-parallel ranks.

    Sequence parallelism does not split its input (`DecoderModel.rows`): every rank computes all of the head and its
    gradient.
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
