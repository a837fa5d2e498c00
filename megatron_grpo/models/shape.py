"""Sizes of a model, under one name each: enough to check layouts, build the model and read its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder-only model, under one name each whatever the family calls them."""

    family: str
    """Name of the family in models.families."""
    layers: int
    hidden: int
    ffn_hidden: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """HF's rope parameters when they scale the frequencies ("rope_type" other than "default"), else None."""
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight instead of by weight."""
    post_norms: bool = False
    """What attention and feed-forward give is normalised before it is added to the residual stream."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate in the feed-forward; gelu_tanh: GeLU in its approximation by tanh."""
    softmax_scale: float | None = None
    """Factor of the product of a query and a key; None: 1 / sqrt(head_dim)."""
    embedding_scale: float | None = None
    """Factor of the embeddings, rounded to their dtype; None: they are taken as they are."""
    window: int | None = None
    """Tokens that each token sees in the layers that have a window, itself included; None: no layer has one."""
    windowed: tuple[bool, ...] = ()
    """[layers]: whether a layer has the window; empty: none has."""
    local_rope_theta: float | None = None
    """rope_theta of the layers with a window, without scaling; None: they rotate as the others."""
    value_head: Literal["fresh", "stored"] | None = None
    """The output is one number a token instead of logits: a new head, or the one in the folder of a reward model."""
