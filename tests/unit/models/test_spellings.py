"""Settings with several spellings in config.json, or none, are read as transformers and vLLM read them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.models.families import FAMILIES, parse_model_shape, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.model.attention import compute_scaled_rope

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma3": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**DEEPSEEK, **EXPERTS},
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    known = FAMILIES[family]
    kind = {"architectures": [known.architecture], "model_type": known.model_type or known.name}
    return {**kind, **SIZES, **OF_FAMILY[family], **changes}


def frequencies(shape: ModelShape) -> torch.Tensor:
    if shape.rope_scaling is not None:
        return compute_scaled_rope(shape)[0]
    return 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)


def transformers_reads(raw: dict[str, Any], folder: Path) -> Any:
    """The model that transformers makes of a file; the file is read as `from_pretrained` reads it."""
    (folder / "config.json").write_text(json.dumps(raw))
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


@cache
def vllm_config() -> Any:
    from vllm.transformers_utils.config import get_config

    return get_config


LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = "original_max_position_embeddings"
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
ROTARY: dict[str, dict[str, Any]] = {
    "scaling beside parameters": {"rope_parameters": DEFAULT, "rope_scaling": LINEAR},
    "scaling beside parameters, theta beside both": {
        "rope_theta": 1e6,
        "rope_parameters": DEFAULT,
        "rope_scaling": LINEAR,
    },
    "scaling with a theta": {"rope_theta": 1e6, "rope_scaling": {**LINEAR, "rope_theta": 3e3}},
    "default scaling beside linear parameters": {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "default"}},
    "empty scaling": {"rope_parameters": {**LINEAR, "rope_theta": 7e3}, "rope_scaling": {}},
    "null scaling": {"rope_theta": 2e4, "rope_parameters": None, "rope_scaling": None},
    "two thetas": {"rope_theta": 1e6, "rope_parameters": DEFAULT},
    "type": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "type and rope_type": {"rope_scaling": {"type": "linear", **LINEAR}},
    "no length": {"rope_scaling": LLAMA3},
    "length in the scaling": {"rope_scaling": {**LLAMA3, LENGTH: 32}},
    "length beside the scaling": {"rope_scaling": LLAMA3, LENGTH: 32},
    "two lengths": {"rope_parameters": {**LLAMA3, LENGTH: 64}, LENGTH: 32},
    "nothing": {},
}


@pytest.mark.parametrize("case", ROTARY)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_rotary_settings(family: str, case: str, tmp_path: Path) -> None:
    raw = config_of(family, **ROTARY[case])
    model = transformers_reads(raw, tmp_path)
    torch.testing.assert_close(frequencies(parse_model_shape(raw)), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    told = vllm_config()(tmp_path, trust_remote_code=False).rope_parameters
    assert told == {**model.config.rope_parameters, **told}


YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8}
OF_DEEPSEEK: dict[str, dict[str, Any]] = {
    "scaling beside parameters": {"rope_parameters": DEFAULT, "rope_scaling": {**YARN, LENGTH: 128}},
    "length beside the scaling": {"rope_theta": 5e4, "rope_scaling": {**YARN, "type": "yarn"}, LENGTH: 64},
    "no length, no mscale": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
}


@pytest.mark.parametrize("case", OF_DEEPSEEK)
def test_rotary_settings_of_deepseek(case: str, tmp_path: Path) -> None:
    raw = config_of("deepseek_v3", **OF_DEEPSEEK[case])
    model, shape = transformers_reads(raw, tmp_path), parse_model_shape(raw)
    inverse, factor = compute_scaled_rope(shape)
    torch.testing.assert_close(inverse, model.model.rotary_emb.inv_freq)
    assert factor == model.model.rotary_emb.attention_scaling
    assert shape.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling)


LOCAL, GLOBAL = "sliding_attention", "full_attention"
BY_KIND: dict[str, dict[str, Any]] = {
    "scaling over parameters": {
        "rope_theta": 1e5,
        "rope_parameters": {GLOBAL: {"rope_type": "default", "rope_theta": 7e5}, LOCAL: {"rope_theta": 3e3}},
        "rope_scaling": LINEAR,
    },
    "thetas beside parameters without": {
        "rope_theta": 1e5,
        "rope_local_base_freq": 55.0,
        "rope_parameters": {GLOBAL: {"rope_type": "default"}, LOCAL: {"rope_type": "default"}},
    },
    "thetas beside parameters with": {
        "rope_theta": 1e5,
        "rope_local_base_freq": 55.0,
        "rope_parameters": {GLOBAL: {"rope_theta": 9e5}, LOCAL: {"rope_theta": 8e3}},
    },
    "one kind": {"rope_parameters": {GLOBAL: LINEAR}},
    "old names": {"rope_theta": 1e5, "rope_local_base_freq": 99.0, "rope_scaling": LINEAR},
    "nothing": {},
    "pattern": {"layer_types": None, "sliding_window_pattern": 2},
    "pattern that transformers does not read": {"layer_types": None, "_sliding_window_pattern": 2},
}


@pytest.mark.parametrize("case", BY_KIND)
def test_rotary_settings_and_windows_of_gemma3(case: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in config_of("gemma3", **BY_KIND[case]).items() if value is not None}
    model, shape = transformers_reads(raw, tmp_path), parse_model_shape(raw)
    assert ["sliding_attention" if one else "full_attention" for one in shape.windowed] == model.config.layer_types
    rotary = model.model.rotary_emb
    assert shape.local_rope_theta == model.config.rope_parameters[LOCAL]["rope_theta"]
    if GLOBAL in model.config.layer_types:
        torch.testing.assert_close(frequencies(shape), rotary.full_attention_inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", OF_FAMILY)
def test_keys_that_are_missing_have_the_values_of_transformers(family: str, tmp_path: Path) -> None:
    """Each key is taken out on its own; a file that transformers refuses is refused here too, or asks for the key."""
    whole = config_of(family)
    del whole["model_type"]
    for key in (*list(whole)[1:], "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "norm_topk_prob"):
        raw = {name: value for name, value in whole.items() if name != key}
        shape = shape_or_key(raw, key)
        if shape is None:
            continue
        config = transformers_config(raw, tmp_path)
        heads, hidden = config.num_attention_heads, config.hidden_size
        if shape.latent is None:
            assert shape.key_value_heads == config.num_key_value_heads, key
        assert shape.head_dim == (getattr(config, "head_dim", None) or hidden // heads), key
        assert (shape.norm_eps, shape.tied_embeddings) == (config.rms_norm_eps, config.tie_word_embeddings), key
        assert shape.max_positions == config.max_position_embeddings, key
        rope = config.rope_parameters
        assert shape.rope_theta == rope.get("full_attention", rope)["rope_theta"], key
        if shape.experts is not None:
            assert shape.experts.count == config.num_local_experts, key
        if shape.latent is not None:
            assert shape.experts.scaling == config.routed_scaling_factor, key
            if key != "n_group":  # transformers' 8 do not fit 4 experts
                assert (shape.experts.groups, shape.experts.top_groups) == (config.n_group, config.topk_group), key
            assert shape.latent.query_rank == config.q_lora_rank, key


def shape_or_key(raw: dict[str, Any], key: str) -> ModelShape | None:
    """The shape; None: the file is refused by the name of the key that was taken out."""
    try:
        return parse_model_shape(raw)
    except ValueError as error:
        if key not in str(error) and "num_attention_heads" not in str(error):
            raise
        return None


def transformers_config(raw: dict[str, Any], folder: Path) -> Any:
    family = FAMILIES[parse_model_shape(raw).family]
    kind = {"model_type": family.model_type or family.name}
    (folder / "config.json").write_text(json.dumps({**kind, **raw}))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}),
        ("mixtral", {"num_experts": 8, "num_local_experts": 4}),
        ("deepseek_v3", {"n_routed_experts": 4, "num_local_experts": 8}),
        ("mixtral", {"num_experts": 8, "num_local_experts": None}),
    ],
)
def test_two_numbers_of_experts(family: str, counts: dict[str, Any], tmp_path: Path) -> None:
    raw = {name: value for name, value in config_of(family, **counts).items() if value is not None}
    assert parse_model_shape(raw).experts.count == transformers_config(raw, tmp_path).num_local_experts == 8


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        # vLLM refuses the first two, transformers goes by rope_type.
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "type=linear .* differ"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_type=default and type=linear"),
        ("gemma3", {"rope_parameters": {}, "rope_scaling": LINEAR}, "rope_parameters={} must have"),
        ("qwen3", {"rope_parameters": {GLOBAL: DEFAULT}}, "rope_parameters has settings by kind of layer"),
        ("llama", {"rope_theta": None}, "rope_theta=null is not supported"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta=null"),
        # transformers computes another model than vLLM.
        ("llama", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("qwen2", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ("gemma3", {"rotary_pct": 0.5}, "rotary_pct=0.5"),
        ("llama", {"sliding_window": 128}, "sliding_window=128 is not supported for llama"),
        ("deepseek_v3", {"sliding_window": 128}, "sliding_window=128 is not supported for deepseek_v3"),
        ("llama", {"layer_types": [LOCAL, GLOBAL], "sliding_window": None}, "layer_types with sliding_attention"),
        ("qwen3", {"layer_types": [LOCAL, GLOBAL], "sliding_window": 8}, "layer_types with sliding_attention"),
        ("llama", {"qkv_bias": True}, "qkv_bias=true .* vLLM would compute another model"),
        ("llama", {"bias": True}, "bias=true"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("qwen2", {"is_causal": False}, "is_causal=false"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config="),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"index_topk": 64}, "index_topk=64"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "tie_word_embeddings=true"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": None}}, "mscale=null and mscale_all_dim=0.8"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor=1.0"),
        # transformers refuses these, or cannot compute them.
        ("qwen3", {"head_dim": None}, "head_dim=null is not supported"),
        ("qwen3_moe", {"head_dim": None}, "head_dim=null"),
        ("qwen3_moe", {"num_key_value_heads": None}, "num_key_value_heads=null"),
        ("gemma3", {"rms_norm_eps": None}, "rms_norm_eps=null"),
        ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings=false must be true or false"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ("deepseek_v3", {"n_group": 4}, "a group needs two experts"),
        ("llama", {"model_type": "qwen2"}, "model_type=qwen2 is not that of LlamaForCausalLM"),
        ("llama", {"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config="),
    ],
)
def test_files_that_are_read_in_two_ways_are_refused(family: str, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_model_shape(config_of(family, **change))


@pytest.mark.parametrize(
    ("family", "head_dim", "text"),
    [
        ("qwen2", 32, "head_dim=32 is not supported for qwen2: vLLM takes hidden_size / num_attention_heads = 16"),
        ("deepseek_v3", 32, "head_dim=32 is not supported for deepseek_v3: vLLM takes qk_rope_head_dim = 16"),
        ("deepseek_v3", None, "head_dim=null is not supported for deepseek_v3"),
    ],
)
def test_a_length_of_heads_that_only_transformers_reads(
    family: str, head_dim: int | None, text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(family, head_dim=head_dim)))
    with pytest.raises(ValueError, match=text):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "head_dim"),
        ("llama", "num_key_value_heads"),
        ("mixtral", "head_dim"),
        ("qwen2", "num_key_value_heads"),
    ],
)
def test_null_sizes_are_derived_where_transformers_derives_them(family: str, key: str, tmp_path: Path) -> None:
    raw = config_of(family, **{key: None})
    shape, model = parse_model_shape(raw), transformers_reads(raw, tmp_path)
    rows = model.model.layers[0].self_attn.k_proj.weight.shape[0]
    assert shape.key_value_heads * shape.head_dim == rows
