"""Sizes of a model, under one name each: enough to check layouts, build the model and read its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.config.errors import shown


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The feed-forward networks of a mixture of experts, and how tokens find theirs."""

    count: int
    """Routed experts of a layer."""
    ffn_hidden: int
    """Width of an expert."""
    top_k: int
    """Experts of a token."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have one network for all tokens."""
    shared_ffn_hidden: int = 0
    """Width of the network that every token passes besides; 0: there is none."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    normalised: bool = True
    """Whether the weights of a token's experts add up to one, before `scaling`."""
    scaling: float = 1.0
    """Factor of the weights of a token's experts."""
    selection_bias: bool = False
    """Whether a bias, which no gradient moves, is added to the scores where experts are chosen (DeepSeek-V3)."""
    groups: int = 1
    """Groups of experts; a token's experts are all in the best few of them."""
    top_groups: int = 1
    """Groups that a token's experts are in."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are made of one short vector."""

    query_rank: int | None
    """Length of the vector that queries are made of; None: they are made of the hidden state."""
    rank: int
    """Length of the vector that keys and values are made of."""
    plain_dim: int
    """Of a head's query and key, the part without a position."""
    rope_dim: int
    """Of a head's query and key, the part that is rotated; all heads share the key's."""
    value_dim: int
    """Length of a head's value."""
    rope_interleaved: bool
    """Whether the numbers that are rotated against each other stand side by side, rather than half a vector apart."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model, under one name each whatever the family calls them."""

    family: str
    """Name of the family in `families.FAMILIES`."""
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
    experts: ExpertShape | None = None
    """The mixture of experts; None: every layer is dense."""
    latent: LatentShape | None = None
    """Latent attention; None: every key/value head has matrices of its own."""
    value_head: Literal["fresh", "stored"] | None = None
    """The output is one number a token instead of logits: a new head, or the one in the folder of a reward model."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts rather than one feed-forward network."""
        return self.experts is not None and self.experts.layers[layer]


def read_config_json(file: Path) -> dict[str, Any]:
    """The contents of a config.json.

    Raises:
        ValueError: there is none, it cannot be read, or it is no JSON object; names the file.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file} does not exist; give a folder in Hugging Face format") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # no JSON, thousands of digits or of brackets
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} is no object {{...}} but {type(raw).__name__}; give a folder in Hugging Face format")
    return raw


def size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of things, at least 1.

    Args:
        raw: contents of config.json, by key.
        key: name of the number in config.json.
        default: taken when the key is missing or null; None: the key has to be there.

    Raises:
        ValueError: the key is missing without a default, or is no whole number of at least 1.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={shown(value)} must be a whole number above 0")
    return value


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number above 0.

    Raises:
        ValueError: the value is there, and is something else.
    """
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={shown(value)} must be a number above 0")
    return float(value)


def section(raw: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The first object among keys of one meaning; empty when there is none.

    Raises:
        ValueError: the value is there, and is something else.
    """
    for key in keys:
        value = raw.get(key)
        if value:
            if not isinstance(value, dict):
                raise ValueError(f"{key}={shown(value)} must be an object {{...}}")
            return value
    return {}
