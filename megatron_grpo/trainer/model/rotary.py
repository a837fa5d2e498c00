"""Rotary embeddings at positions that a microbatch names, rather than from 0 to its length."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_grpo.trainer.model.packed_sequences import PackedSequences
from megatron_grpo.weights.shape import ModelShape


class RotaryAtPositions(torch.nn.Module):
    """Stands in for Megatron-Core's rotary embedding in the torch layers.

    Packed sequences each begin at position 0, and context-parallel ranks hold parts of them: every token brings its
    position along. Frequencies, and what is made of them, are those of the embedding that this one wraps.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        assert not rotary.rotary_interleaved, "halves of a head are rotated against each other"
        self.rotary = rotary

    def get_rotary_seq_len(self, *given: Any) -> Any:
        """What `forward` is called with: positions of the packed sequences, else as Megatron-Core has it, a length.

        Args:
            given: what Megatron-Core's method takes; the last is the packed sequences, or None.
        """
        *_, packed = given
        if isinstance(packed, PackedSequences):
            return packed.positions
        return self.rotary.get_rotary_seq_len(*given)

    def forward(self, positions: Tensor | int, **_: Any) -> Tensor:
        """Angles of the rotations.

        Args:
            positions: [tokens], int64; or a length, for positions from 0 on.

        Returns:
            [tokens, 1, 1, head_dim], float32.
        """
        if isinstance(positions, int):
            return self.rotary(positions)
        frequencies = torch.outer(positions.to(self.rotary.inv_freq.dtype), self.rotary.inv_freq)
        return torch.cat([frequencies, frequencies], dim=-1)[:, None, None]


class GlobalAndLocalRotary(torch.nn.Module):
    """Two rotary embeddings at once: for layers that see everything, and for those with a window."""

    def __init__(self, everywhere: RotaryAtPositions, local: RotaryAtPositions) -> None:
        super().__init__()
        self.everywhere, self.local = everywhere, local

    def get_rotary_seq_len(self, *given: Any) -> Any:
        """What `forward` is called with; `given` is what Megatron-Core's method takes."""
        return self.everywhere.get_rotary_seq_len(*given)

    def forward(self, positions: Tensor | int, **_: Any) -> Tensor:
        """Angles of the rotations, of which a layer takes those of its kind.

        Args:
            positions: [tokens], int64; or a length, for positions from 0 on.

        Returns:
            [2, tokens, 1, 1, head_dim], float32: of layers that see everything, then of those with a window.
        """
        return torch.stack([self.everywhere(positions), self.local(positions)])


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
