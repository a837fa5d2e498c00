"""Counts the floating-point operations of a model from its weight map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from megatron_grpo.models.families import INPUT, build_weight_map
from megatron_grpo.models.heads import LOGITS
from megatron_grpo.models.megatron_names import TOWER
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_axes import measure_axis
from megatron_grpo.models.weight_map import iter_entries


def count_forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Count floating-point operations of one forward pass, regardless of padding.

    Two per token and weight of a matrix that the token passes (Chowdhery et al. 2022, "PaLM", appendix B), with the
    output layer and without the embedding look-up; and, in each head and layer, two per visible query-key pair and
    element of a query and of a value. A token sees its own sequence up to itself: s (s + 1) / 2 pairs for s tokens; in
    a layer with a window of w it sees the last w tokens, so tokens beyond the w-th make w pairs each, and in a layer
    with chunks those of its chunk up to itself. In a delta net a token multiplies each head's matrix three times, to
    read what it holds for the key, to write, and to read for the query; in a layer with Mamba it writes into each
    head's state, and reads from it. An indexer multiplies its queries by the keys of all visible pairs, and attention
    then sees as many tokens as it chooses. A value model counts as the language model that it starts from.
    """
    weights, sizes = 0, shape.sizes
    for entry, _, _ in iter_entries(build_weight_map(replace(shape, head=LOGITS)), shape, range(shape.layers)):
        if entry.name != INPUT.name and not entry.name.startswith(TOWER):
            passed = shape.experts.top_k if shape.experts is not None and entry.per_expert else 1
            weights += passed * prod(measure_axis(axis, sizes) for axis in entry.axes) if len(entry.axes) >= 2 else 0
    if (mamba := shape.mamba) is not None:
        weights += 2 * shape.count_layers("mamba") * mamba.heads * mamba.head_dim * mamba.state
    if (delta := shape.delta) is not None:
        weights += shape.count_layers("delta") * 3 * delta.value_heads * delta.key_dim * delta.value_dim
    pairs = windowed_pairs = sum(map(_count_causal_pairs, lengths))
    if shape.window is not None:
        windowed_pairs = sum(_count_windowed_pairs(length, shape.window, shape.chunked) for length in lengths)
    index_products = 0
    if (indexer := shape.indexer) is not None:  # which scores all pairs
        index_products = sum(indexer.layers) * indexer.heads * indexer.head_dim * pairs
        pairs = sum(_count_windowed_pairs(length, indexer.top_k, is_chunk=False) for length in lengths)
    products, latent = 0, shape.latent
    for layer in range(shape.layers):
        if not shape.list_kinds(layer) & {"attention", "global", "latent"}:
            continue
        head = 2 * shape.find_heads(layer).head_dim
        head = head if latent is None else latent.plain_dim + latent.rope_dim + latent.value_dim
        products += head * (windowed_pairs if shape.windowed and shape.windowed[layer] else pairs)
    return 2.0 * weights * sum(lengths) + 2.0 * shape.attention_heads * products + 2.0 * index_products


def _count_causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def _count_windowed_pairs(length: int, window: int, is_chunk: bool) -> int:
    if is_chunk:
        return length // window * _count_causal_pairs(window) + _count_causal_pairs(length % window)
    return _count_causal_pairs(min(length, window)) + window * max(length - window, 0)
