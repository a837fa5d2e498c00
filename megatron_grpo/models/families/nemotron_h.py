"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, a feed-forward network or experts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.llama import ATTENTION, read_dense
from megatron_grpo.models.families.mixtures import read_expert_count, read_top_k
from megatron_grpo.models.shape import ExpertShape, MambaShape, ModelShape, read_number, read_size

_CHANNELS = "x * mamba_groups * mamba_heads * mamba_dim | b * mamba_groups * state | c * mamba_groups * state"
_MAMBA = f"""
    mamba: self_attention.in_proj.weight
            [z * mamba_groups * mamba_heads * mamba_dim | {_CHANNELS} | dt * mamba_groups * mamba_heads, hidden]
        = mixer.in_proj.weight
    mamba: self_attention.conv1d_weight [{_CHANNELS}, channel, kernel] = mixer.conv1d.weight
    mamba: self_attention.conv1d_bias [{_CHANNELS}] = mixer.conv1d.bias
    mamba: self_attention.dt_bias [mamba_groups * mamba_heads] = mixer.dt_bias
    mamba: self_attention.A_log [mamba_groups * mamba_heads] = mixer.A_log
    mamba: self_attention.D [mamba_groups * mamba_heads] = mixer.D
    mamba: self_attention.norm_weight [mamba_groups * mamba_heads * mamba_dim] = mixer.norm.weight
    mamba: self_attention.out_proj.weight [hidden, mamba_groups * mamba_heads * mamba_dim] = mixer.out_proj.weight
"""
_NORMS = """
    mixer: input_layernorm.weight [hidden] = norm.weight
    mlp: pre_mlp_layernorm.weight [hidden] = norm.weight
"""
_MLP = """
    dense: mlp.linear_fc1.weight [ffn, hidden] = mixer.up_proj.weight
    dense: mlp.linear_fc2.weight [hidden, ffn] = mixer.down_proj.weight
"""
_EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = mixer.gate.weight
    experts: mlp.router.expert_bias [experts] = mixer.gate.e_score_correction_bias
    latent_experts: mlp.fc1_latent_proj.weight [expert_hidden, hidden] = mixer.fc1_latent_proj.weight
    latent_experts: mlp.fc2_latent_proj.weight [hidden, expert_hidden] = mixer.fc2_latent_proj.weight
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [expert_ffn, expert_hidden]
        = mixer.experts.{expert}.up_proj.weight
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [expert_hidden, expert_ffn]
        = mixer.experts.{expert}.down_proj.weight
    experts: mlp.shared_experts.linear_fc1.weight [shared_ffn, hidden] = mixer.shared_experts.up_proj.weight
    experts: mlp.shared_experts.linear_fc2.weight [hidden, shared_ffn] = mixer.shared_experts.down_proj.weight
"""

# Names of layers in the pattern and in the lists, of which the older ones come second.
_KINDS = {"M": ("linear_attention", "mamba"), "*": ("full_attention", "attention"), "-": ("mlp",), "E": ("moe",)}
_LISTS = ("layers_block_type", "layer_types")
# Values with which an option changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "mamba_conv_bias": (True,),
    "n_shared_experts": (1,),  # vLLM multiplies the width by it, transformers does not
    "norm_topk_prob": (True,),
    "n_group": (1,),
    "topk_group": (1,),
    "tie_word_embeddings": (False,),  # neither ties the head
    "sliding_window": (None,),  # vLLM's attention would have it
}
_RENAMED_KEYS = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"}
_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


def _read(raw: dict[str, Any]) -> ModelShape:
    for key, neutral in _NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            raise ValueError(
                f"{key}={to_text(json.dumps(raw[key]))} is not supported for nemotron_h; "
                f"only {to_text(json.dumps(neutral[0]))} is"
            )
    for key, alias in _RENAMED_KEYS.items():  # transformers takes the older name where both are given
        raw = {**raw, key: raw[alias]} if alias in raw else raw
    kinds = _list_layers(raw)
    names = {
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": read_number(raw, "layer_norm_epsilon", 1e-5),
        # Attention does not know positions; released files have settings of rotary embeddings nevertheless.
        "rope_scaling": None,
        "rope_parameters": None,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000.0,
    }
    rest = {key: value for key, value in raw.items() if key not in _LISTS}
    shape = read_dense({**rest, **names}, "nemotron_h", defaults=_DEFAULTS)
    return replace(
        shape,
        activation="relu2",
        mamba=_read_mamba(raw) if "M" in kinds else None,
        mamba_layers=tuple(kind == "M" for kind in kinds),
        unrotated=(True,) * len(kinds),
        single_halves=tuple("mixer" if kind in "M*" else "mlp" for kind in kinds),
        experts=_read_experts(raw, kinds) if "E" in kinds else None,
    )


def _list_layers(raw: Mapping[str, Any]) -> str:
    """List the layers by their letters in the pattern."""
    letters = {name: letter for letter, names in _KINDS.items() for name in names}
    key = next((key for key in _LISTS if raw.get(key) is not None), "hybrid_override_pattern")
    layers = raw.get(key)
    if not isinstance(layers, list if key in _LISTS else str) or not layers:
        raise ValueError(f"{key}={to_text(layers)} must name the kind of every layer")
    unknown = [kind for kind in layers if kind not in (letters if key in _LISTS else _KINDS)]
    if unknown:
        raise ValueError(f"{key} with {to_text(unknown[0])} is not supported; layers are {', '.join(letters)}")
    count = raw.get("num_hidden_layers")
    if count is not None and count != len(layers):
        raise ValueError(f"num_hidden_layers={to_text(count)} and the {len(layers)} layers of {key} differ")
    return "".join(letters.get(kind, kind) for kind in layers)


def _read_mamba(raw: Mapping[str, Any]) -> MambaShape:
    heads, groups = read_size(raw, "mamba_num_heads", 128), read_size(raw, "n_groups", 8)
    if heads % groups:
        raise ValueError(f"mamba_num_heads={heads} is not a multiple of n_groups={groups}")
    return MambaShape(
        heads=heads,
        groups=groups,
        head_dim=read_size(raw, "mamba_head_dim", 64),
        state=read_size(raw, "ssm_state_size", 128),
        kernel=read_size(raw, "conv_kernel", 4),
    )


def _read_experts(raw: Mapping[str, Any], kinds: Sequence[str]) -> ExpertShape:
    count = read_expert_count(raw, "num_local_experts", "n_routed_experts", 8)
    top_k = read_top_k({"num_experts_per_tok": 2, **raw}, count)
    return ExpertShape(
        count=count,
        ffn_hidden=read_size(raw, "moe_intermediate_size", 7688),
        top_k=top_k,
        layers=tuple(kind == "E" for kind in kinds),
        shared_ffn_hidden=read_size(raw, "moe_shared_expert_intermediate_size", 7688),
        score="sigmoid",
        scaling=read_number(raw, "routed_scaling_factor", 1.0),
        selection_bias=True,
        latent=None if raw.get("moe_latent_size") is None else read_size(raw, "moe_latent_size"),
    )


FAMILY = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    has_reward_models=False,
    read=_read,
    tables=(_NORMS, _MAMBA, ATTENTION, _MLP, _EXPERTS),
    renamed={
        "model.embed_tokens": "backbone.embeddings",
        "model.norm.": "backbone.norm_f.",
        "model.layers": "backbone.layers",
        "self_attn.": "mixer.",
    },
    has_further_predictions=True,
)
