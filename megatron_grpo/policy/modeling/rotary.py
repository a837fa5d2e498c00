"""Rotary embeddings at positions that a microbatch names, rather than from 0 to its length."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_grpo.policy.modeling.packed_sequences import PackedSequences


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
