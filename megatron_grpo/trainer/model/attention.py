"""Causal attention and rotary embeddings of the torch layers: packed sequences, windows, context-parallel ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_grpo.models.shape import HeadShape, ModelShape, QueryScale
from megatron_grpo.trainer.model.layers import UnweightedNorm
from megatron_grpo.trainer.model.packed_sequences import AttentionRectangle, PackedSequences


def select_rows(tokens: Tensor, index: Tensor) -> Tensor:
    """Select rows of [tokens, ...] by an index of any shape."""
    # The look-up of embeddings, whose backward is much faster than that of indexing.
    return F.embedding(index, tokens.flatten(1)).unflatten(-1, tokens.shape[1:])


class TorchCoreAttention(torch.nn.Module):
    """Causal attention with grouped queries by torch's fused kernel.

    softmax(q k^T / sqrt(d)) v, with the softmax in float32. Context-parallel ranks gather each other's keys and values,
    and attend with the queries that they hold. Attention is always causal: masks and biases are ignored, and padding
    stands to the right, where no token sees it. With `softmax_type="learnable"` each head has a sink.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Tokens that each token sees, itself included, or of a chunk of the sequence; None: all before it.
        self.window: int | None = config.window_size[0] + 1 if windowed else None
        self._on_gpu = config.platform.is_like_cuda
        self._context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.softmax_offset: Any = None  # [heads of this rank], the logits of the sinks; None: heads have none
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            sinks = torch.empty(heads, dtype=config.params_dtype, device=config.platform.device)
            self.softmax_offset = torch.nn.Parameter(sinks)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Build the checkpoint's entries, named as those of Transformer Engine."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        masks: Sequence[Tensor | None] | None = None,
        **__: Any,
    ) -> Tensor:
        # From [tokens, 1, heads, head_dim], for keys and values fewer heads, to [tokens, 1, heads * value_dim]. `masks`
        # are those of the attention calls where they have other than causal ones.
        assert isinstance(packed_seq_params, PackedSequences), "sequences without their layout"
        if self._context is not None:
            # One message for both. Backward sums the gradients of a key over all ranks' queries and scatters them.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._context)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        calls = packed_seq_params.calls if self.window is None else packed_seq_params.windowed_calls
        assert calls is not None, "the microbatch was made for a model without windows"
        parts = [
            self._attend(query[:, 0], key[:, 0], value[:, 0], rectangle, None if masks is None else masks[number])
            for number, rectangle in enumerate(calls.rectangles)
        ]
        return select_rows(torch.cat(parts), calls.out)[:, None].flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, rectangle: AttentionRectangle, mask: Tensor | None
    ) -> Tensor:
        # From [tokens, heads, head_dim] to [slots of queries, heads, value_dim]. Only dropped queries see repeats.
        keys, values = (select_rows(tensor, rectangle.keys).transpose(1, 2) for tensor in (key, value))
        if mask is None and (not rectangle.square or (self.window or math.inf) < rectangle.keys.shape[1]):
            mask = rectangle.make_causal_mask(self.window)[:, None]
        # On GPUs FlashAttention alone takes fewer key heads, but no mask and no float32; other kernels hold all scores.
        if self._on_gpu and (mask is not None or query.dtype == torch.float32):
            keys, values = (
                tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (keys, values)
            )
        queries = select_rows(query, rectangle.queries).transpose(1, 2)
        compute = _attend_to_keys if self.softmax_offset is None else partial(_attend_with_sinks, self.softmax_offset)
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        return compute(queries, keys, values, mask, scale).transpose(1, 2).flatten(0, 1)


def _attend_to_keys(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def _attend_with_sinks(
    sinks: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend to the keys and to a sink, whose value is 0.

    `sinks`: [heads], the logits of the sink. No kernel of torch takes such logits, so they are products: each head of a
    group gets a further feature, which is 1 in its queries, its logit / scale in the first key, and 0 elsewhere.
    """
    groups, width = keys.shape[1], values.shape[-1]
    features = queries.shape[1] // groups
    indicators = torch.eye(features, dtype=queries.dtype, device=queries.device).repeat(groups, 1)
    queries = torch.cat([queries, indicators[:, None].expand(*queries.shape[:3], features)], dim=-1)
    first = F.pad((sinks / scale).view(groups, 1, features), (keys.shape[-1], 0)).to(keys.dtype)
    keys = torch.cat([first.expand(len(keys), -1, -1, -1), F.pad(keys, (0, features))], dim=2)
    values = F.pad(values, (0, keys.shape[-1] - width, 1, 0))
    if mask is not None:
        return _attend_to_keys(queries, keys, values, F.pad(mask, (1, 0), value=True), scale)[..., :width]
    # Causal attention counts queries and keys from the first, so that a query stands before the others too.
    return _attend_to_keys(F.pad(queries, (0, 0, 1, 0)), keys, values, None, scale)[:, :, 1:, :width]


class GrowingQueries:
    """First base class of attention with growing queries (Llama 4, Ministral 3)."""

    scale: QueryScale

    def forward(self, query: Tensor, *arguments: Any, packed_seq_params: Any = None, **keywords: Any) -> Any:
        # The query is [tokens, ..., head_dim].
        positions = packed_seq_params.positions.float() + self.scale.offset
        factors = 1.0 + self.scale.slope * torch.log1p(torch.floor(positions / self.scale.length))
        query = (query * factors.view(-1, *[1] * (query.dim() - 1))).type_as(query)
        return super().forward(query, *arguments, packed_seq_params=packed_seq_params, **keywords)  # type: ignore[misc]


class LocalOrGlobalSelfAttention(SelfAttention):
    """Self-attention with another rotary embedding in windowed layers (Gemma 3, OLMo 3)."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        core, config = self.core_attention, self.config
        if core.window is None:  # the factor of rotated queries and keys; embeddings of windowed layers have none
            core.softmax_scale = (core.softmax_scale or config.kv_channels**-0.5) * config.rope_factor**2

    def forward(self, *arguments: Any, rotary_pos_emb: Any = None, **keywords: Any) -> Any:
        size = self.hidden_size_per_attention_head
        rotary = rotary_pos_emb[..., :size] if self.core_attention.window is None else rotary_pos_emb[..., -size:]
        return super().forward(*arguments, rotary_pos_emb=rotary, **keywords)


class QueryKeyLinear(ColumnParallelLinear):
    """The projection to queries and keys, where keys are the values too."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        value_size = config.kv_channels * config.num_query_groups
        super().__init__(input_size, output_size - value_size, config=config, **settings)


class ValueNormSelfAttention(LocalOrGlobalSelfAttention):
    """Self-attention with normalised values and perhaps own heads (Gemma 4)."""

    def __init__(self, config: TransformerConfig, *arguments: Any, heads: HeadShape | None, **keywords: Any) -> None:
        if heads is not None:
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = heads.head_dim, heads.key_value_heads
        super().__init__(config, *arguments, **keywords)
        self.v_norm = UnweightedNorm(self.hidden_size_per_attention_head, config.layernorm_epsilon)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values: [tokens, 1, heads, head_dim] each."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, ranks = self.config.num_query_groups, self.pg_collection.tp.size()
        sharing, rank = max(1, ranks // groups), self.pg_collection.tp.rank()  # ranks that share a key/value head
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.chunk(groups, dim=-1)[rank // sharing]
        heads = mixed.unflatten(-1, (max(1, groups // ranks), -1, self.hidden_size_per_attention_head))
        queries = self.config.num_attention_heads // groups
        # Behind a group's queries lie its key and its value, or its key alone.
        query, key, value = heads[:, :, :, :queries].flatten(2, 3), heads[:, :, :, queries], heads[:, :, :, -1]
        query = query.chunk(sharing, dim=2)[rank % sharing]
        return self.q_layernorm(query), self.k_layernorm(key), self.v_norm(value)


class RotaryAtPositions(torch.nn.Module):
    """Rotary embedding of the torch layers: angles at the microbatch's positions.

    Every packed sequence begins at position 0, and context-parallel ranks hold chunks of sequences, so Megatron-Core's
    angles at 0 to length do not fit. Frequencies are those of the wrapped embeddings; windowed layers have the second,
    if there are two. `axes`: [rotated features / 2], the part of a position in time, height and width that each
    frequency turns by; empty: a token has one position.
    """

    def __init__(self, *rotaries: RotaryEmbedding, axes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.rotaries: Any = torch.nn.ModuleList(rotaries)
        self.axes = axes

    # Megatron-Core passes on to `forward` what this returns, here the positions of the packed sequences.
    def get_rotary_seq_len(self, *arguments: Any) -> Tensor:
        packed = arguments[-1]
        assert isinstance(packed, PackedSequences), "sequences without their layout"
        if not self.axes:
            return packed.positions
        assert packed.grid_positions is not None, "the microbatch was made for a model without images"
        return packed.grid_positions[list(self.axes)]

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Compute angles: [tokens, 1, 1, rotated features], float32.

        `positions`: [tokens], or [rotated features / 2, tokens] of models with images. Angles of two embeddings stand
        side by side.
        """
        angles = []
        for rotary in self.rotaries:
            turns = positions.to(rotary.inv_freq.dtype)
            frequencies = turns.T * rotary.inv_freq if self.axes else torch.outer(turns, rotary.inv_freq)
            # One angle for two features: neighbours, or those at the same place in the two halves.
            is_interleaved = rotary.rotary_interleaved
            both = frequencies.repeat_interleave(2, dim=-1) if is_interleaved else frequencies.repeat(1, 2)
            angles.append(both[:, None, None])
        return torch.cat(angles, dim=-1)


class RotaryTable(torch.nn.Module):
    """Rotary embedding of Transformer Engine's layers: one table of angles.

    Megatron-Core would keep a table for each of the last 32 lengths, and packed microbatches nearly all differ: with a
    longest sequence of 32,768 tokens that is half a gigabyte.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary
        self.get_rotary_seq_len = rotary.get_rotary_seq_len  # tokens of the longest sequence
        self._table: Tensor | None = None

    def forward(self, length: int, *, packed_seq: bool, **_: Any) -> Tensor:
        """Look up the angles at positions 0 to `length`."""
        assert packed_seq, "Transformer Engine takes each context-parallel rank's positions from the whole table"
        if self._table is None or len(self._table) < length:
            self._table = self.rotary.get_emb(length)
        return self._table[:length]


def compute_scaled_rope(shape: ModelShape) -> tuple[Tensor, float]:
    """Compute inverse frequencies, [rotated features / 2], and a factor of rotated vectors."""
    # Imported here because it takes seconds and only models with scaled frequencies need it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert shape.rope_scaling is not None
    scaling = {**shape.rope_scaling, "rope_theta": shape.rope_theta}
    rope_type = scaling.get("rope_type") or scaling.get("type")
    head_dim = shape.rotated_dim or (shape.global_heads.head_dim if shape.global_heads else shape.head_dim)
    config = LlamaConfig(  # of one head: Llama's heads have to divide the hidden size
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={**scaling, "rope_type": rope_type},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


def find_rope_factor(shape: ModelShape) -> float:
    """Find the factor of rotated queries and keys; 1 without scaled frequencies."""
    return 1.0 if shape.rope_scaling is None else compute_scaled_rope(shape)[1]
