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
    value_head: Literal["fresh", "stored"] | None = None
    """The output is one number a token instead of logits: a new head, or the one in the folder of a reward model."""
