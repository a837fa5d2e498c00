"""Sizes of a model, under one name in all families: enough to check layouts, build the model and read its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.config.errors import to_text
from megatron_grpo.config.outside_files import parse_file_json, read_bytes
from megatron_grpo.models.heads import LOGITS, Head
from megatron_grpo.models.megatron_names import Half
from megatron_grpo.models.vision_shape import VisionShape

LayerKind = Literal[
    "mixer",
    "attention",
    "unrotated",
    "global",
    "own_value",
    "key_as_value",
    "qkv_bias",
    "qk_norm",
    "delta",
    "mamba",
    "latent",
    "full_query",
    "compressed_query",
    "indexer",
    "mlp",
    "dense",
    "experts",
    "single_experts",
    "packed_experts",
    "latent_experts",
    "image_features",
]
"""Kinds of layers, by their attention or what stands in its place (mixer), and by their feed-forward network (mlp).
Features of images are added to the output of layers of the last kind."""

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""Activation of the gate in the feed-forward; gelu_tanh: GeLU in its approximation by tanh; clamped_swiglu: that of
gpt-oss, gate * sigmoid(1.702 * gate) * (up + 1) with gate and up clamped; relu2: the square of ReLU, in a feed-forward
without gate."""


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
    packed: bool = False  # a tensor of the folder holds the matrices of all experts, rather than each expert's its own
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid of its own
    score: Literal["softmax", "sigmoid"] = "softmax"  # turns the router's logits into scores
    normalised: bool = True
    """Whether the weights of a token's experts add up to one, before `scaling`."""
    scaling: float = 1.0  # factor of the weights of a token's experts
    selection_bias: bool = False
    """Whether experts are chosen by score plus a bias that no gradient updates (DeepSeek-V3)."""
    bias: bool = False  # of the router, and of both matrices of each expert
    groups: int = 1  # groups that the experts are divided into
    top_groups: int = 1  # best groups, from which all experts of a token are chosen
    scales_input: bool = False  # whether a token's weight multiplies the expert's input rather than its output
    beside_dense: bool = False
    """Whether the shared expert is a dense network with norms of its own, and the router has a norm and factors."""
    latent: int | None = None
    """Length of the vector that a token is projected to for its routed experts, whose sum is projected back; None: they
    read and write the hidden state itself."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-latent attention (DeepSeek-V2, 2.1): keys and values come from one short vector."""

    query_rank: int | None
    """Length of the vector that queries are projected from; None: they are projected from the hidden state."""
    rank: int  # length of the vector that keys and values are projected from
    plain_dim: int  # length of the part of a head's query and key that is not rotated
    rope_dim: int  # length of the rotated part; all heads share the key's
    value_dim: int  # length of a head's value
    norm_eps: float = 1e-6
    """Epsilon of the norms of short vectors, for which no family has a key."""


@dataclass(frozen=True, kw_only=True)
class IndexerShape:
    """Sparse attention (DeepSeek-V3.2, 2.1): an indexer chooses the tokens that a token attends to.

    The indexer has queries of several heads, and one key a token.
    """

    heads: int
    head_dim: int  # the first `rope_dim` of the latent attention are rotated
    top_k: int  # tokens that a token attends to
    layers: tuple[bool, ...]
    """Whether each layer has an indexer; the others attend to the tokens that the last one before them chose."""
    interleaved_rope: bool  # neighbours are rotated against each other instead of halves

    def find_source(self, layer: int) -> int:
        """Find the layer whose indexer chooses for a layer."""
        return max(number for number in range(layer + 1) if self.layers[number])


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """A gated delta net (Yang et al. 2024).

    Each head keeps a matrix in place of all keys and values.
    """

    key_heads: int  # heads of queries and keys
    value_heads: int  # heads of values, and matrices of the state; a multiple of `key_heads`
    key_dim: int  # features of a head's query and key
    value_dim: int  # features of a head's value
    kernel: int  # tokens that the convolution of queries, keys and values sees

    @property
    def channels(self) -> int:
        """Features of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


LEAST_TIME_STEP = 1e-30
"""`time_step_min` with which transformers, as vLLM and training, raises no time step; 0 has no logarithm."""


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """Mamba-2 (Dao and Gu 2024), whose heads keep a state.

    The state of a head, [state, head_dim], stands in place of all keys and values.
    """

    heads: int
    groups: int  # neighbouring heads of a group share what they write with (B) and read with (C)
    head_dim: int
    state: int  # length of B and C
    kernel: int  # tokens that the convolution of inputs, B and C sees

    @property
    def channels(self) -> int:
        """Features of the convolution."""
        return self.heads * self.head_dim + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes of a layer's key/value heads."""

    key_value_heads: int
    head_dim: int
    key_is_value: bool = False  # whether values are the keys, before these are normalised and rotated


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Factor of queries that grows with their position.

    At position p it is 1 + slope * log(1 + floor((p + offset) / length)).
    """

    slope: float
    length: int  # in tokens
    offset: int = 0


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
    qk_norm: bool  # each head of queries and keys is normalised
    full_width_qk_norm: bool = False
    """Whether all heads of queries are normalised together, and all of keys."""
    rotated_dim: int | None = None  # features of a head that are rotated, its first; None: all
    interleaved_rope: bool = False  # neighbours are rotated against each other instead of halves
    attention_bias: bool = False  # of the projection of attention's output
    output_gate: bool = False
    """Whether the output of attention is multiplied by a sigmoid, whose gates are rows of the query's matrix."""
    sinks: bool = False
    """Whether each head has a learned logit that takes a share of attention and adds no value."""
    zero_centered_norms: bool = False  # norms multiply by 1 + weight instead of by weight
    pre_norms: bool = True  # the inputs of attention and feed-forward are normalised
    post_norms: bool = False
    """Whether the outputs of attention and feed-forward are normalised before they join the residual stream."""
    activation: Activation = "silu"
    softmax_scale: float | None = None  # factor of query-key products; None: 1 / sqrt(head_dim)
    embedding_scale: float | None = None
    """Factor of the embeddings, rounded to their dtype; None: embeddings are not scaled."""
    window: int | None = None
    """Tokens that each token attends to in layers with a window, itself included; None: no layer has one."""
    windowed: tuple[bool, ...] = ()  # [layers]: whether a layer has the window; empty: none has
    chunked: bool = False
    """Whether windows are chunks of the sequence, of which each token sees the part before it."""
    unrotated: tuple[bool, ...] = ()  # [layers]: whether a layer has no rotary embedding; empty: all have one
    unweighted_qk_norm: bool = False  # query and key heads are normalised without a weight, in rotated layers
    query_scale: QueryScale | None = None
    """Factor of queries, in unrotated layers alone if there are any; None: 1."""
    global_heads: HeadShape | None = None  # heads of layers without a window; None: those of the other layers
    value_norm: bool = False  # value heads are normalised without a weight
    layer_scale: bool = False  # a layer's output is multiplied by a number, which is not trained
    logit_cap: float | None = None  # c, if logits z are c * tanh(z / c)
    local_rope_theta: float | None = None
    """rope_theta of the layers with a window, without scaling; None: that of the other layers."""
    experts: ExpertShape | None = None  # None: every layer is dense
    latent: LatentShape | None = None  # None: every key/value head has matrices of its own
    indexer: IndexerShape | None = None  # of latent attention; None: a token attends to all before it
    delta: DeltaShape | None = None
    delta_layers: tuple[bool, ...] = ()  # [layers]: whether a layer has a delta net in place of attention; empty: none
    mamba: MambaShape | None = None
    mamba_layers: tuple[bool, ...] = ()  # [layers]: whether a layer has Mamba-2 in place of attention; empty: none has
    single_halves: tuple[Half, ...] = ()
    """[layers]: the one half that a layer consists of; empty: layers have both."""
    text_prefix: str = ""
    """Beginning of names in a model that also sees images, of which this is the text part; empty: it is the whole."""
    vision: VisionShape | None = None  # how images come into the model; None: it is trained on text alone
    head: Head = LOGITS
    has_stored_head: bool = True  # whether a scalar head is in the model's folder, which is a reward model's, or new

    @property
    def is_text_part(self) -> bool:
        """Whether the folder's model also sees images."""
        return bool(self.text_prefix) or self.vision is not None

    @property
    def fits_transformer_engine(self) -> bool:
        """Whether Transformer Engine's layers can express the model's."""
        has_torch_attention = self.local_rope_theta is not None or self.chunked or self.value_norm or bool(self.vision)
        # With other heads cuDNN below 9.26 makes wrong gradients of sinks in packed sequences.
        has_torch_attention |= self.sinks and self.head_dim not in (64, 128, 256)
        return not (self.post_norms or has_torch_attention or self.layer_scale)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def has_gates(self) -> bool:
        """Whether feed-forward networks have a gate beside their first matrix."""
        return self.activation != "relu2"

    def has_delta(self, layer: int) -> bool:
        return bool(self.delta_layers) and self.delta_layers[layer]

    def has_mamba(self, layer: int) -> bool:
        return bool(self.mamba_layers) and self.mamba_layers[layer]

    def is_global(self, layer: int) -> bool:
        """Whether a layer has other heads than those with a window."""
        return self.global_heads is not None and not self.windowed[layer]

    def find_heads(self, layer: int) -> HeadShape:
        """Find the sizes of a layer's key/value heads."""
        if self.global_heads is not None and self.is_global(layer):
            return self.global_heads
        return HeadShape(key_value_heads=self.key_value_heads, head_dim=self.head_dim)

    def list_kinds(self, layer: int) -> frozenset[LayerKind]:
        """List the kinds that a layer is of."""
        halves: dict[Half, Callable[[int], set[LayerKind]]] = {
            "mixer": self._list_mixer_kinds,
            "mlp": self._list_mlp_kinds,
        }
        present = self.single_halves[layer : layer + 1] or tuple(halves)
        of_layer: set[LayerKind] = {"image_features"} if self.vision and layer < self.vision.levels else set()
        return frozenset(of_layer.union(*({half} | halves[half](layer) for half in present)))

    def _list_mixer_kinds(self, layer: int) -> set[LayerKind]:
        if self.has_delta(layer):
            return {"delta"}
        if self.has_mamba(layer):
            return {"mamba"}
        if self.latent is not None:
            kinds: set[LayerKind] = {"latent", "full_query" if self.latent.query_rank is None else "compressed_query"}
            return kinds | {"indexer"} if self.indexer is not None and self.indexer.layers[layer] else kinds
        if self.is_global(layer):
            return {"global", "key_as_value" if self.find_heads(layer).key_is_value else "own_value"}
        options: dict[LayerKind, bool] = {
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
            "unrotated": bool(self.unrotated) and self.unrotated[layer],
        }
        return {"attention", *(kind for kind, has_option in options.items() if has_option)}

    def _list_mlp_kinds(self, layer: int) -> set[LayerKind]:
        if not self.has_experts(layer):
            return {"dense"}
        assert self.experts is not None
        kinds: set[LayerKind] = {"experts", "packed_experts" if self.experts.packed else "single_experts"}
        return kinds if self.experts.latent is None else kinds | {"latent_experts"}

    def count_layers(self, kind: LayerKind) -> int:
        """Count the layers of a kind."""
        return sum(kind in self.list_kinds(layer) for layer in range(self.layers))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names of factors in the weight map (`weight_axes`).

        "query", "key" and "value" count the features of a key/value group, "global_query" and so on those of a layer
        with other heads, "mamba_heads" the heads of a group of Mamba; the "latent_..." are features of a head. Tensor
        parallelism does not split "all_queries" and "all_keys".
        """
        features, groups = self.head_dim, self.key_value_heads
        sizes = {"vocab": self.vocab, "hidden": self.hidden, "ffn": self.ffn_hidden, "score": 1}
        sizes |= {"heads": self.attention_heads, "groups": groups, "head_dim": features}
        sizes |= {"per_group": self.attention_heads // groups, "scalar": 1}
        sizes |= {"query": self.attention_heads // groups * features, "key": features, "value": features}
        sizes |= {"all_queries": self.attention_heads * features, "all_keys": groups * features}
        if (heads := self.global_heads) is not None:
            features, groups = heads.head_dim, heads.key_value_heads
            sizes |= {"global_groups": groups, "global_query": self.attention_heads // groups * features}
            sizes |= {"global_key": features, "global_value": features, "global_head_dim": features}
        if (experts := self.experts) is not None:
            sizes |= {"experts": experts.count, "expert_ffn": experts.ffn_hidden}
            sizes |= {"shared_ffn": experts.shared_ffn_hidden, "expert_hidden": experts.latent or self.hidden}
        if (latent := self.latent) is not None:
            sizes |= {"query_rank": latent.query_rank or 0, "latent": latent.rank, "latent_value": latent.value_dim}
            sizes["compressed"] = latent.rank + latent.rope_dim
            sizes["latent_query"] = latent.plain_dim + latent.rope_dim
            sizes["latent_key_value"] = latent.plain_dim + latent.value_dim
        if (indexer := self.indexer) is not None:
            sizes |= {"index_query": indexer.heads * indexer.head_dim, "index_key": indexer.head_dim}
            sizes["index_heads"] = indexer.heads
        if (delta := self.delta) is not None:
            sizes |= {"key_heads": delta.key_heads, "per_key": delta.value_heads // delta.key_heads}
            sizes |= {"key_dim": delta.key_dim, "value_dim": delta.value_dim, "kernel": delta.kernel, "channel": 1}
        if (mamba := self.mamba) is not None:
            sizes |= {"mamba_groups": mamba.groups, "mamba_heads": mamba.heads // mamba.groups}
            sizes |= {"mamba_dim": mamba.head_dim, "state": mamba.state, "kernel": mamba.kernel, "channel": 1}
        return sizes


def read_config_json(file: Path) -> dict[str, Any]:
    """Read a config.json; ValueError names a missing or damaged file."""
    try:
        raw = parse_file_json(read_bytes(file, links=True).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file} does not exist; give a folder in Hugging Face format") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    except ValueError as error:  # no file, no JSON, thousands of digits or of brackets
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} is not a JSON object but of type {type(raw).__name__}; give a Hugging Face folder")
    return raw


def read_size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a whole number above 0; ValueError: it is not one, or null.

    `default`: result when the key is missing; None: the key is required.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        _refuse_null(raw, key)
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={to_text(value)} must be a whole number above 0")
    return value


def read_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Read a number above 0 from config.json; ValueError: it is not one, or null."""
    value = raw.get(key)
    if value is None:
        _refuse_null(raw, key)
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={to_text(value)} must be a number above 0")
    return float(value)


def _refuse_null(raw: Mapping[str, Any], key: str) -> None:
    """Refuse a null, which neither transformers nor vLLM replaces by a default."""
    if key in raw:
        raise ValueError(f"{key}=null is not supported; give the number, or leave the key out")


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
