"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3, where an indexer chooses the tokens that a token attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.deepseek_v3 import (
    EXPERT_BIAS,
    LATENT_ATTENTION,
    SHARED_EXPERTS,
    read_latent,
    read_sparse_layers,
)
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.llama import INPUT_NORM, MLP, MLP_NORM
from megatron_grpo.models.families.mixtures import EXPERTS
from megatron_grpo.models.shape import IndexerShape, ModelShape, read_flag, read_size

# Every rank holds the whole indexer.
_INDEXER = """
    indexer: self_attention.core_attention.indexer.linear_wq_b.weight [index_query, query_rank]
        = self_attn.indexer.wq_b.weight
    indexer: self_attention.core_attention.indexer.linear_wk.weight [index_key, hidden] = self_attn.indexer.wk.weight
    indexer: self_attention.core_attention.indexer.k_norm.weight [index_key] = self_attn.indexer.k_norm.weight
    indexer: self_attention.core_attention.indexer.k_norm.bias [index_key] = self_attn.indexer.k_norm.bias
    indexer: self_attention.core_attention.indexer.linear_weights_proj.weight [index_heads, hidden]
        = self_attn.indexer.weights_proj.weight
"""
_TABLES = (INPUT_NORM, LATENT_ATTENTION, _INDEXER, MLP_NORM, MLP, EXPERTS, EXPERT_BIAS, SHARED_EXPERTS)
_INTERLEAVED = "indexer_rope_interleave"
# Keys by which both libraries, or transformers alone, say which layers have an indexer.
_PATTERN, _FREQUENCY, _OFFSET, _TYPES = (
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
    "indexer_types",
)


def _read_deepseek(raw: dict[str, Any]) -> ModelShape:
    # transformers' class has indexers in all layers, and rotates halves in them.
    layers = read_size(raw, "num_hidden_layers")
    if read_flag(raw, _INTERLEAVED, default=False):
        text = f"{_INTERLEAVED}=true is not supported for deepseek_v32: only vLLM reads it; remove it"
        raise ValueError(text)
    if not all(_list_full_layers(raw, layers)):
        key = next(key for key in (_PATTERN, _FREQUENCY) if raw.get(key) is not None)
        raise ValueError(
            f"{key}={to_text(raw[key])} is not supported for deepseek_v32, "
            "whose layers all have an indexer in transformers; remove it"
        )
    defaults = {"max_position_embeddings": 163840}
    shape = read_latent(_leave_out(raw), "deepseek_v32", defaults=defaults)
    return _add_indexer(shape, raw, heads=64, layers=(True,) * layers, interleaved=False)


def _read_glm(raw: dict[str, Any]) -> ModelShape:
    if raw.get(_INTERLEAVED) is not True:  # transformers always rotates neighbours
        text = f'has no {_INTERLEAVED}=true, without which vLLM would rotate halves; add "{_INTERLEAVED}": true'
        raise ValueError(text)
    defaults = {"max_position_embeddings": 202752, "rms_norm_eps": 1e-5}
    plain = {"q_lora_rank": 2048, **_leave_out(raw)}
    shape = read_latent(plain, "glm_moe_dsa", defaults=defaults, groups=(1, 1))
    full = _list_full_layers(raw, shape.layers)
    types = raw.get(_TYPES)
    if types is not None:
        if not isinstance(types, list) or len(types) != shape.layers or not {"full", "shared"}.issuperset(types):
            raise ValueError(f"{_TYPES}={to_text(types)} must say full or shared for each of {shape.layers} layers")
        if full != tuple(kind == "full" for kind in types):
            letters = "".join(kind[0].upper() for kind in types)
            text = f'{_TYPES} of config.json is not what vLLM reads; add "{_PATTERN}": "{letters}"'
            raise ValueError(text)
    if not full[0]:
        raise ValueError(f"{_PATTERN} begins with a layer without an indexer, which has no layer to share one with")
    return _add_indexer(shape, raw, heads=32, layers=full, interleaved=True)


def _leave_out(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the keys of sparse attention, which other families refuse."""
    types, layers = raw.get("layer_types"), raw.get("mlp_layer_types")
    if isinstance(types, list) and any(kind != "indexed_attention" for kind in types):
        raise ValueError(f"layer_types={to_text(types)} is not supported; only indexed_attention is")
    if isinstance(layers, list):  # vLLM reads the number of dense layers alone
        sparse = read_sparse_layers(raw, len(layers), default=3)
        if layers != ["sparse" if is_sparse else "dense" for is_sparse in sparse]:
            dense = len(sparse) - sum(sparse)
            raise ValueError(
                f"mlp_layer_types={to_text(layers)} contradicts first_k_dense_replace={dense}, which vLLM reads; "
                "the first layers have to be the dense ones"
            )
    return {key: value for key, value in raw.items() if key not in ("index_topk", "layer_types")}


def _list_full_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """List which layers have an indexer, as vLLM reads it."""
    pattern = raw.get(_PATTERN)
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or not {*"FS"}.issuperset(pattern):
            raise ValueError(f"{_PATTERN}={to_text(pattern)} must have F or S for each of {layers} layers")
        return tuple(letter == "F" for letter in pattern)
    frequency, offset = read_size(raw, _FREQUENCY, 1), raw.get(_OFFSET, 2)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ValueError(f"{_OFFSET}={to_text(offset)} must be a whole number")
    return tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(layers))


def _add_indexer(
    shape: ModelShape, raw: Mapping[str, Any], *, heads: int, layers: tuple[bool, ...], interleaved: bool
) -> ModelShape:
    assert shape.latent is not None
    read_size(raw, "num_key_value_heads", 1)  # transformers refuses a null, although nothing depends on the number
    if shape.latent.query_rank is None:
        raise ValueError(f"q_lora_rank=null is not supported for {shape.family}: the indexer reads the short query")
    indexer = IndexerShape(
        heads=read_size(raw, "index_n_heads", heads),
        head_dim=read_size(raw, "index_head_dim", 128),
        top_k=read_size(raw, "index_topk", 2048),
        layers=layers,
        interleaved_rope=interleaved,
    )
    if indexer.head_dim < shape.latent.rope_dim:
        raise ValueError(
            f"index_head_dim={indexer.head_dim} is less than qk_rope_head_dim={shape.latent.rope_dim}, "
            "the features of a head that are rotated"
        )
    return replace(shape, indexer=indexer)


FAMILIES = (
    Family(
        name="deepseek_v32",
        architecture="DeepseekV32ForCausalLM",
        has_reward_models=False,
        read=_read_deepseek,
        tables=_TABLES,
        has_further_predictions=True,
        proposes_tokens=True,
    ),
    Family(
        name="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        has_reward_models=False,
        read=_read_glm,
        tables=_TABLES,
        has_further_predictions=True,
        proposes_tokens=True,
    ),
)
