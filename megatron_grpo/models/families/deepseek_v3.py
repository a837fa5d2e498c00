"""DeepSeek-V3, Moonlight, Kimi-K2: latent attention, shared experts, experts chosen by sigmoid scores and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.llama import INPUT_NORM, MLP, MLP_NORM, read_dense
from megatron_grpo.models.families.mixtures import EXPERTS, read_expert_count, read_top_k
from megatron_grpo.models.families.options import WINDOW
from megatron_grpo.models.families.rotary import compute_yarn_scale
from megatron_grpo.models.shape import ExpertShape, LatentShape, ModelShape, read_number, read_size

# Every rank holds the whole compressed query.
LATENT_ATTENTION = """
    full_query: self_attention.linear_q_proj.weight [heads * latent_query, hidden] = self_attn.q_proj.weight
    compressed_query: self_attention.linear_q_down_proj.weight [query_rank, hidden] = self_attn.q_a_proj.weight
    compressed_query: self_attention.q_layernorm.weight [query_rank] = self_attn.q_a_layernorm.weight
    compressed_query: self_attention.linear_q_up_proj.weight [heads * latent_query, query_rank]
        = self_attn.q_b_proj.weight
    latent: self_attention.linear_kv_down_proj.weight [compressed, hidden] = self_attn.kv_a_proj_with_mqa.weight
    latent: self_attention.kv_layernorm.weight [latent] = self_attn.kv_a_layernorm.weight
    latent: self_attention.linear_kv_up_proj.weight [heads * latent_key_value, latent] = self_attn.kv_b_proj.weight
    latent: self_attention.linear_proj.weight [hidden, heads * latent_value] = self_attn.o_proj.weight
"""
_DEFAULTS = {"max_position_embeddings": 4096}
EXPERT_BIAS = "experts: mlp.router.expert_bias [experts] = mlp.gate.e_score_correction_bias"
SHARED_EXPERTS = """
    experts: mlp.shared_experts.linear_fc1.weight [gate * shared_ffn | up * shared_ffn, hidden]
        = mlp.shared_experts.gate_proj.weight [gate * shared_ffn, hidden]
        + mlp.shared_experts.up_proj.weight [up * shared_ffn, hidden]
    experts: mlp.shared_experts.linear_fc2.weight [hidden, shared_ffn] = mlp.shared_experts.down_proj.weight
"""


def read_latent(
    raw: dict[str, Any], family: str, *, defaults: Mapping[str, Any] = _DEFAULTS, groups: tuple[int, int] = (8, 4)
) -> ModelShape:
    """Read the sizes of a model with latent attention and experts, as `read_dense`.

    `defaults` are transformers' values of keys that the file lacks, `groups` those of n_group and topk_group.
    """
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if raw.get(key, value) != value:
            raise ValueError(f"{key}={to_text(raw[key])} is not supported for {family}; only {value} is")
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if key not in raw:  # transformers assumes this value; vLLM would choose by softmax, or without the bias
            raise ValueError(f'has no {key}, without which vLLM would choose other experts; add "{key}": "{value}"')
    # For read_dense a head is its rotated part alone.
    heads = {"head_dim": read_size(raw, "qk_rope_head_dim"), "num_key_value_heads": raw.get("num_attention_heads")}
    options = {**WINDOW, "rope_interleave": (True,), "tie_word_embeddings": (False,)}
    shape = read_dense(
        {**raw, **heads},
        family,
        rope_types=("default", "yarn"),
        defaults=defaults,
        options=options,
    )
    # Settings of YaRN that vLLM reads otherwise than transformers are refused.
    rope = shape.rope_scaling or {}
    for key, neutral in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, neutral) != neutral:
            raise ValueError(f"{key}={to_text(rope[key])} is not supported for {family}: vLLM ignores it; remove it")
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        raise ValueError(
            f"mscale={to_text(rope.get('mscale'))} and mscale_all_dim={to_text(rope.get('mscale_all_dim'))}: "
            "transformers and vLLM agree only if both are above 0, or both are missing"
        )
    query_rank = raw.get("q_lora_rank", 1536)
    latent = LatentShape(
        query_rank=None if query_rank is None else read_size({"q_lora_rank": query_rank}, "q_lora_rank"),
        rank=read_size(raw, "kv_lora_rank"),
        plain_dim=read_size(raw, "qk_nope_head_dim"),
        rope_dim=shape.head_dim,
        value_dim=read_size(raw, "v_head_dim"),
    )
    scale = (latent.plain_dim + latent.rope_dim) ** -0.5
    if rope.get("mscale_all_dim"):
        scale *= compute_yarn_scale(read_number(rope, "factor", 1.0), read_number(rope, "mscale_all_dim", 1.0)) ** 2
    return replace(shape, latent=latent, softmax_scale=scale, experts=read_sigmoid_experts(raw, shape.layers, groups))


def read_sigmoid_experts(
    raw: Mapping[str, Any],
    layers: int,
    default_groups: tuple[int, int],
    *,
    count: int = 256,
    scaling: float = 2.5,
    dense: int = 3,
) -> ExpertShape:
    """Read experts that are chosen by sigmoid scores and a bias.

    Defaults: `default_groups` of n_group and topk_group, `count` experts, their `scaling`, `dense` layers without.
    """
    count = read_expert_count(raw, "num_local_experts", "n_routed_experts", count)
    width, top_k = read_size(raw, "moe_intermediate_size"), read_top_k(raw, count)
    # transformers' default of 8 groups needs 16 experts.
    default = default_groups if count >= 16 or "n_group" in raw else (1, 1)
    groups, top_groups = read_groups({"n_group": default[0], "topk_group": default[1], **raw}, count, top_k)
    return ExpertShape(
        count=count,
        ffn_hidden=width,
        top_k=top_k,
        layers=read_sparse_layers(raw, layers, default=dense),
        shared_ffn_hidden=width * read_size(raw, "n_shared_experts", 1),
        score="sigmoid",
        scaling=read_number(raw, "routed_scaling_factor", scaling),
        selection_bias=True,
        groups=groups,
        top_groups=top_groups,
    )


def read_sparse_layers(raw: Mapping[str, Any], layers: int, default: int) -> tuple[bool, ...]:
    """Read which layers have experts; `default`: number of first layers without."""
    dense = raw.get("first_k_dense_replace", default)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise ValueError(f"first_k_dense_replace={to_text(dense)} must be a number of layers")
    return tuple(layer >= dense for layer in range(layers))


def read_groups(raw: Mapping[str, Any], count: int, top_k: int) -> tuple[int, int]:
    """Read the groups of experts and how many a token chooses from.

    ValueError: Megatron-Core would choose other groups.
    """
    groups, top_groups = read_size(raw, "n_group"), read_size(raw, "topk_group")
    if count < 2 * groups:
        raise ValueError(f"n_group={groups} of {count} experts is not supported; a group needs two experts or more")
    if groups > 1 and (count % groups or top_k != 2 * top_groups):
        # A group's score is the sum of its two best experts; Megatron-Core sums as many as a token has in each group.
        text = f"n_group={groups} with topk_group={top_groups} and num_experts_per_tok={top_k} is not supported; "
        raise ValueError(text + "groups must be equally large, with two experts of a token in each of its groups")
    return groups, top_groups


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=partial(read_latent, family="deepseek_v3"),
    tables=(INPUT_NORM, LATENT_ATTENTION, MLP_NORM, MLP, EXPERTS, EXPERT_BIAS, SHARED_EXPERTS),
    other_model_types=("kimi_k2",),
    has_further_predictions=True,
    proposes_tokens=True,
)
