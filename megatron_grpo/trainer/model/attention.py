"""Causal attention and rotary embeddings of the torch layers: packed sequences, windows, context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_grpo.trainer.model.packed_sequences import AttentionCalls, AttentionGroup, PackedSequences
from megatron_grpo.weights.shape import ModelShape


class IntoSlots(torch.autograd.Function):
    """Copies tokens, [tokens, ...], any float type, to slots of rectangles, [slots, ...]: the token of each slot and a
    slot of each token, both int64. The gradients of slots that repeat a token have to be 0.

    A gather whose backward is a gather too; autograd's own is a scatter-add, which is far slower.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return tokens.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


class OutOfSlots(torch.autograd.Function):
    """Takes each token's value out of its slot, [slots, ...] to [tokens, ...]; no slot is taken twice.

    Backward copies gradients to the gathered slots, and leaves 0 in those that repeat a token.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.slots = len(values)
        return values.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        values = gradients[0].new_zeros(ctx.slots, *gradients[0].shape[1:])
        return values.index_copy_(0, back, gradients[0]), None


class TorchCoreAttention(torch.nn.Module):
    """softmax(q k^T / sqrt(d)) v, causal, with grouped queries, by torch's fused kernel (softmax in float32).

    Context-parallel ranks gather each other's keys and values, and attend with the queries that they hold.
    """

    def __init__(
        self, config: TransformerConfig, *, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if windowed else None
        """Tokens that each token sees, itself included; None: all before it."""
        self._context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

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
            query: [length, sequences, heads, head_dim], any float type; packed sequences are one sequence here.
            key: [length, sequences, groups, head_dim], in the dtype of the query.
            value: [length, sequences, groups, value_dim], in the dtype of the query.
            attention_mask: ignored, as are attn_mask_type and attention_bias: attention is always causal, and padding
                stands to the right, where no real token sees it.
            packed_seq_params: where the packed sequences lie (`PackedSequences`); None: the sequences are rectangles.

        Returns:
            [length, sequences, heads * value_dim], the dtype of the query.
        """
        if packed_seq_params is None:
            assert self._context is None, "context parallelism needs packed sequences"
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = self._attend(q, k, v, self._rectangle_mask(query.shape[0], query.device))
            return out.permute(2, 0, 1, 3).flatten(2)
        assert isinstance(packed_seq_params, PackedSequences), "packed sequences without their layout"
        if self._context is not None:
            # One message for both. Backward sums the gradients of a key over all ranks' queries and scatters them.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._context)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        calls = packed_seq_params.calls if self.window is None else packed_seq_params.windowed_calls
        assert calls is not None, "the microbatch was made for a model without windows"
        out = self._in_calls(query[:, 0], key[:, 0], value[:, 0], calls)
        return out[:, None].flatten(2)

    def _in_calls(self, query: Tensor, key: Tensor, value: Tensor, calls: AttentionCalls) -> Tensor:
        """[tokens, heads or groups, head_dim] each, to [tokens of this rank, heads, value_dim]."""
        if calls.slots is not None and calls.out is not None:
            query = IntoSlots.apply(query, calls.slots, calls.out)
            if calls.own_keys:  # repeated slots are visible only to queries whose output is discarded
                key, value = (IntoSlots.apply(tensor, calls.slots, calls.out) for tensor in (key, value))
        sizes = [group.queries.numel() for group in calls.groups]
        queries = query.split(sizes)
        if calls.own_keys:
            keys, values = key.split(sizes), value.split(sizes)
        else:  # a key may be seen by the queries of several parts
            keys, values = ([tensor[group.keys.flatten()] for group in calls.groups] for tensor in (key, value))
        parts = [self._group(*each) for each in zip(queries, keys, values, calls.groups, strict=True)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        result: Tensor = out if calls.out is None else OutOfSlots.apply(out, calls.out)
        return result

    def _group(self, query: Tensor, key: Tensor, value: Tensor, group: AttentionGroup) -> Tensor:
        """One attention call: [slots, heads or groups, head_dim] each, to [slots of queries, heads, value_dim]."""
        queries = query.unflatten(0, group.queries.shape).transpose(1, 2)
        keys, values = (tensor.unflatten(0, group.keys.shape).transpose(1, 2) for tensor in (key, value))
        sees_all = self.window is None or group.keys.shape[1] <= self.window
        mask = None if group.square and sees_all else self._mask(group)
        return self._attend(queries, keys, values, mask).transpose(1, 2).flatten(0, 1)

    def _mask(self, group: AttentionGroup) -> Tensor:
        """[parts, 1, most queries, most keys], bool: whether a query sees a key."""
        ends = group.first[:, None] + torch.arange(group.queries.shape[1], device=group.first.device)
        return self._seen(ends[..., None], torch.arange(group.keys.shape[1], device=group.first.device))[:, None]

    def _rectangle_mask(self, length: int, device: torch.device) -> Tensor | None:
        """[length, length], bool: whether a query sees a key; None: simply causal."""
        if self.window is None:
            return None
        positions = torch.arange(length, device=device)
        return self._seen(positions[:, None], positions)

    def _seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., queries, 1] and [keys], int64, to [..., queries, keys], bool: whether a query sees a key."""
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[sequences, heads, length, head_dim] each, any float type, to [sequences, heads, queries, value_dim]."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class LocalOrGlobalSelfAttention(SelfAttention):
    """Self-attention of models that rotate queries and keys otherwise in layers with a window (Gemma 3)."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **named: Any
    ) -> Any:
        """Megatron-Core's; rotary_pos_emb, [2, length, 1, 1, head_dim], float32, is from `GlobalAndLocalRotary`."""
        rotary = rotary_pos_emb[0 if self.core_attention.window is None else 1]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary, **named)


class RotaryAtPositions(torch.nn.Module):
    """Replaces Megatron-Core's rotary embedding in the torch layers: angles at given positions, not at 0 to length.

    Every packed sequence begins at position 0, and context-parallel ranks hold chunks of sequences, so the microbatch
    says each token's position. Frequencies are those of the wrapped embedding.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        assert not rotary.rotary_interleaved, "halves of a head are rotated against each other"
        self.rotary = rotary

    def get_rotary_seq_len(self, *given: Any) -> Any:
        """The argument of `forward`: the positions of packed sequences, else the length that Megatron-Core computes.

        Args:
            given: Megatron-Core's arguments; the last is the packed sequences, or None.
        """
        *_, packed = given
        if isinstance(packed, PackedSequences):
            return packed.positions
        return self.rotary.get_rotary_seq_len(*given)

    def forward(self, positions: Tensor | int, **_: Any) -> Tensor:
        """Positions [tokens], int64, or a length (positions from 0), to angles [tokens, 1, 1, head_dim], float32."""
        if isinstance(positions, int):
            return self.rotary(positions)
        frequencies = torch.outer(positions.to(self.rotary.inv_freq.dtype), self.rotary.inv_freq)
        return torch.cat([frequencies, frequencies], dim=-1)[:, None, None]


class GlobalAndLocalRotary(torch.nn.Module):
    """Two rotary embeddings at once: of layers that see the whole sequence, and of those with a window."""

    def __init__(self, everywhere: RotaryAtPositions, local: RotaryAtPositions) -> None:
        super().__init__()
        self.everywhere, self.local = everywhere, local

    def get_rotary_seq_len(self, *given: Any) -> Any:
        """The argument of `forward`, as `RotaryAtPositions` has it."""
        return self.everywhere.get_rotary_seq_len(*given)

    def forward(self, positions: Tensor | int, **_: Any) -> Tensor:
        """[tokens], int64, or a length, to angles [2, tokens, 1, 1, head_dim], float32: without and with a window."""
        return torch.stack([self.everywhere(positions), self.local(positions)])


def scaled_rope_frequencies(shape: ModelShape) -> Tensor:
    """Inverse frequencies of a model whose rotary embeddings are scaled: [head_dim / 2], float32."""
    return _frequencies_and_factor(shape)[0].float()


def rope_factor(shape: ModelShape) -> float:
    """Factor of the rotated vectors (YaRN); 1 for models without scaled rotary embeddings."""
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
