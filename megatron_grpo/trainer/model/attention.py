"""Causal attention of the torch layer spec: over rectangles, packed sequences, windows and context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_grpo.trainer.model.packed_sequences import AttentionCalls, AttentionGroup, PackedSequences


def into_slots(tokens: Tensor, slots: Tensor, back: Tensor) -> Tensor:
    """Copy tokens to the slots of rectangles. What backward is given for slots that repeat a token has to be 0.

    Args:
        tokens: [tokens, ...], any float type.
        slots: [slots], int64: the token of each slot.
        back: [tokens], int64: the slot of each token; further slots that hold it only repeat it.

    Returns:
        [slots, ...], the dtype of the tokens.
    """
    taken: Tensor = _IntoSlots.apply(tokens, slots, back)
    return taken


def out_of_slots(values: Tensor, back: Tensor) -> Tensor:
    """Take each token's value out of its slot, and leave those of slots that repeat a token.

    Args:
        values: [slots, ...], any float type.
        back: [tokens], int64: the slot of each token, no slot twice.

    Returns:
        [tokens, ...], the dtype of the values.
    """
    taken: Tensor = _OutOfSlots.apply(values, back)
    return taken


class _IntoSlots(torch.autograd.Function):
    """A gather whose backward is a gather: autograd's own would add up into zeros, number by number."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return tokens.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


class _OutOfSlots(torch.autograd.Function):
    """A gather whose backward copies to the slots that were taken, and leaves 0 in the others."""

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
            assert self._context is None, "context parallelism needs to know where the sequences lie"
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = self._attend(q, k, v, self._rectangle_mask(query.shape[0], query.device))
            return out.permute(2, 0, 1, 3).flatten(2)
        assert isinstance(packed_seq_params, PackedSequences), "packed sequences without their places"
        if self._context is not None:
            # In one message. Backward adds up what every rank's queries say of a key, and hands each rank its own.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._context)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        calls = packed_seq_params.calls if self.window is None else packed_seq_params.windowed_calls
        assert calls is not None, "the microbatch was made for a model without windows"
        out = self._in_calls(query[:, 0], key[:, 0], value[:, 0], calls)
        return out[:, None].flatten(2)

    def _in_calls(self, query: Tensor, key: Tensor, value: Tensor, calls: AttentionCalls) -> Tensor:
        """[tokens, heads or groups, head_dim] each, to [tokens of this rank, heads, value_dim]."""
        if calls.slots is not None and calls.out is not None:
            query = into_slots(query, calls.slots, calls.out)
            if calls.own_keys:  # slots that repeat a key are of keys that only queries see whose output is left out
                key, value = (into_slots(tensor, calls.slots, calls.out) for tensor in (key, value))
        sizes = [group.queries.numel() for group in calls.groups]
        queries = query.split(sizes)
        if calls.own_keys:
            keys, values = key.split(sizes), value.split(sizes)
        else:  # queries of several parts may see a key
            keys, values = ([tensor[group.keys.flatten()] for group in calls.groups] for tensor in (key, value))
        parts = [self._group(*each) for each in zip(queries, keys, values, calls.groups, strict=True)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if calls.out is None else out_of_slots(out, calls.out)

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
    """Self-attention that rotates queries and keys by one of two embeddings, as its layer has a window or has none."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **named: Any
    ) -> Any:
        """Megatron-Core's, with one of two rotary embeddings.

        Args:
            hidden_states: [length, sequences, hidden], any float type; with sequence parallelism this rank's tokens.
            attention_mask: ignored by the core attention.
            rotary_pos_emb: [2, length, 1, 1, head_dim], float32: `GlobalAndLocalRotary`.
            named: passed on.
        """
        rotary = rotary_pos_emb[0 if self.core_attention.window is None else 1]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary, **named)
