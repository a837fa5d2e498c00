"""Sizes of a model, under one name in all families: enough to check layouts, build the model and read its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.config.errors import to_text

LayerKind = Literal["mixer", "attention", "latent", "full_query", "compressed_query", "mlp", "dense", "experts"]
"""Kinds of layers, by their attention or what stands in its place (mixer), and by their feed-forward network (mlp)."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of a mixture of experts, and how its router chooses."""

    count: int  # routed experts in a layer
    ffn_hidden: int  # hidden width of a routed expert
    top_k: int  # routed experts that each token goes through
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have one dense feed-forward network."""
    shared_ffn_hidden: int = 0
    """Hidden width of the shared expert, which every token goes through; 0: there is none."""
    score: Literal["softmax", "sigmoid"] = "softmax"  # turns the router's logits into scores
    normalised: bool = True
    """Whether the weights of a token's experts add up to one, before `scaling`."""
    scaling: float = 1.0  # factor of the weights of a token's experts
    selection_bias: bool = False
    """Whether experts are chosen by score plus a bias that no gradient updates (DeepSeek-V3)."""
    groups: int = 1  # groups that the experts are divided into
    top_groups: int = 1  # best groups, from which all experts of a token are chosen


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-latent attention (DeepSeek-V2, 2.1): keys and values come from one short vector."""

    query_rank: int | None
    """Length of the vector that queries are projected from; None: they are projected from the hidden state."""
    rank: int  # length of the vector that keys and values are projected from
    plain_dim: int  # length of the part of a head's query and key that is not rotated
    rope_dim: int  # length of the rotated part; all heads share the key's
    value_dim: int  # length of a head's value


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model, under one name in all families."""

    family: str  # name in `families.FAMILIES`
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
    zero_centered_norms: bool = False  # norms multiply by 1 + weight instead of by weight
    post_norms: bool = False
    """Whether the outputs of attention and feed-forward are normalised before they join the residual stream."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the gate in the feed-forward; gelu_tanh: GeLU in its approximation by tanh."""
    softmax_scale: float | None = None  # factor of query-key products; None: 1 / sqrt(head_dim)
    embedding_scale: float | None = None
    """Factor of the embeddings, rounded to their dtype; None: embeddings are not scaled."""
    window: int | None = None
    """Tokens that each token attends to in layers with a window, itself included; None: no layer has one."""
    windowed: tuple[bool, ...] = ()  # [layers]: whether a layer has the window; empty: none has
    local_rope_theta: float | None = None
    """rope_theta of the layers with a window, without scaling; None: that of the other layers."""
    experts: ExpertShape | None = None  # None: every layer is dense
    latent: LatentShape | None = None  # None: every key/value head has matrices of its own
    value_head: Literal["fresh", "stored"] | None = None
    """Head of a value model (one number a token): new, or stored in a reward model's folder; None: a language model."""

    @property
    def fits_transformer_engine(self) -> bool:
        """Whether Transformer Engine's layers can express the model's."""
        return not self.post_norms and self.local_rope_theta is None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def list_kinds(self, layer: int) -> frozenset[LayerKind]:
        """List the kinds that a layer is of."""
        mixers: tuple[LayerKind, ...] = ("attention",)
        if self.latent is not None:
            mixers = "latent", "full_query" if self.latent.query_rank is None else "compressed_query"
        return frozenset({"mixer", "mlp", *mixers, "experts" if self.has_experts(layer) else "dense"})

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names of factors in the weight map (`weight_axes`).

        "query", "key" and "value" count the features of a key/value group; the "latent_..." are features of a head.
        """
        features, groups = self.head_dim, self.key_value_heads
        sizes = {"vocab": self.vocab, "hidden": self.hidden, "ffn": self.ffn_hidden, "score": 1}
        sizes |= {"heads": self.attention_heads, "groups": groups, "head_dim": features}
        sizes |= {"query": self.attention_heads // groups * features, "key": features, "value": features}
        if (experts := self.experts) is not None:
            sizes |= {"experts": experts.count, "expert_ffn": experts.ffn_hidden}
            sizes["shared_ffn"] = experts.shared_ffn_hidden
        if (latent := self.latent) is not None:
            sizes |= {"query_rank": latent.query_rank or 0, "latent": latent.rank, "latent_value": latent.value_dim}
            sizes["compressed"] = latent.rank + latent.rope_dim
            sizes["latent_query"] = latent.plain_dim + latent.rope_dim
            sizes["latent_key_value"] = latent.plain_dim + latent.value_dim
        return sizes


def read_config_json(file: Path) -> dict[str, Any]:
    """Read a config.json; ValueError names a missing or damaged file."""
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
        raise ValueError(f"{file} is not a JSON object but of type {type(raw).__name__}; give a Hugging Face folder")
    return raw


def read_size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a whole number above 0; ValueError: it is not one.

    `default`: result when the key is missing or null; None: the key is required.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={to_text(value)} must be a whole number above 0")
    return value


def read_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Read a number above 0 from config.json; ValueError: it is not one."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={to_text(value)} must be a number above 0")
    return float(value)


def read_flag(raw: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Read a boolean from config.json; ValueError: it is not one."""
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={to_text(value)} must be true or false")
    return value


def read_section(raw: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Read the first non-empty object among keys; ValueError: it is no object."""
    for key in keys:
        value = raw.get(key)
        if value:
            if not isinstance(value, dict):
                raise ValueError(f"{key}={to_text(value)} must be an object {{...}}")
            return value
    return {}
