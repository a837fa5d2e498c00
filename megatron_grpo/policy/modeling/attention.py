"""Causal attention of the torch layer spec, over rectangles of sequences or sequences laid end to end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class TorchCoreAttention(torch.nn.Module):
    """softmax(q k^T / sqrt(d)) v, causal, with grouped queries, by torch's fused kernel (softmax in float32)."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("policy.parallel.context > 1 needs Transformer Engine on a GPU")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of every token to itself and those before it in its sequence; heads of a group share key and value.

        Args:
            query: [length, sequences, heads, head_dim], or [tokens, heads, head_dim] when packed, any float type.
            key: [length, sequences, groups, head_dim], or [tokens, groups, head_dim] when packed, dtype of the query.
            value: [length, sequences, groups, head_dim], or [tokens, groups, head_dim] when packed, dtype of the query.
            attention_mask: ignored, as are attn_mask_type and attention_bias: attention is always causal, and padding
                stands to the right, where no real token sees it.
            packed_seq_params: boundaries of the packed sequences; None: the sequences are rectangles.

        Returns:
            [length, sequences, heads * head_dim], or [tokens, heads * head_dim] when packed, the dtype of the query.
        """
        if packed_seq_params is None:
            return self._attend(query, key, value)
        boundaries = packed_seq_params.cu_seqlens_q_padded
        if boundaries is None:
            boundaries = packed_seq_params.cu_seqlens_q
        # One sequence at a time: torch's kernel knows no boundaries, and a mask of all tokens would be their square.
        lengths = boundaries.diff().tolist()
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q[:, None], k[:, None], v[:, None])[:, 0] for q, k, v in parts])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[length, sequences, heads, head_dim], any float type, to [length, sequences, heads * head_dim]."""
        length, sequences = query.shape[:2]
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).reshape(length, sequences, -1)
