"""Settings with several spellings in config.json, or none, are read as transformers and vLLM read them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.model.attention import compute_scaled_rope
from tests.support.hf_configs import read_configs

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 512,
}
SPELLINGS = read_configs("config_spellings")
OF_FAMILY: dict[str, dict[str, Any]] = SPELLINGS["families"]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    entry = FAMILIES[family]
    kind = {"architectures": [entry.architecture], "model_type": entry.model_type or entry.name}
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


ROTARY: dict[str, dict[str, Any]] = SPELLINGS["rotary"]


@pytest.mark.parametrize("case", ROTARY)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_rotary_settings(family: str, case: str, tmp_path: Path) -> None:
    raw = config_of(family, **ROTARY[case])
    model = transformers_reads(raw, tmp_path)
    torch.testing.assert_close(frequencies(parse_model_shape(raw)), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    engine_parameters = vllm_config()(tmp_path, trust_remote_code=False).rope_parameters
    assert engine_parameters == {**model.config.rope_parameters, **engine_parameters}


OF_DEEPSEEK: dict[str, dict[str, Any]] = SPELLINGS["rotary_of_deepseek"]


@pytest.mark.parametrize("case", OF_DEEPSEEK)
def test_rotary_settings_of_deepseek(case: str, tmp_path: Path) -> None:
    raw = config_of("deepseek_v3", **OF_DEEPSEEK[case])
    model, shape = transformers_reads(raw, tmp_path), parse_model_shape(raw)
    inverse, factor = compute_scaled_rope(shape)
    torch.testing.assert_close(inverse, model.model.rotary_emb.inv_freq)
    assert factor == model.model.rotary_emb.attention_scaling
    assert shape.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling)


LOCAL, GLOBAL = "sliding_attention", "full_attention"
BY_KIND: dict[str, dict[str, Any]] = SPELLINGS["rotary_of_gemma3"]


@pytest.mark.parametrize("case", BY_KIND)
def test_rotary_settings_and_windows_of_gemma3(case: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in config_of("gemma3", **BY_KIND[case]).items() if value is not None}
    model, shape = transformers_reads(raw, tmp_path), parse_model_shape(raw)
    layer_types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in shape.windowed]
    assert layer_types == model.config.layer_types
    rotary = model.model.rotary_emb
    assert shape.local_rope_theta == model.config.rope_parameters[LOCAL]["rope_theta"]
    if GLOBAL in model.config.layer_types:
        torch.testing.assert_close(frequencies(shape), rotary.full_attention_inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", OF_FAMILY)
def test_keys_that_are_missing_have_the_values_of_transformers(family: str, tmp_path: Path) -> None:
    """Without one key each; a file that transformers refuses is refused here, or asks for the key."""
    full_config = config_of(family)
    del full_config["model_type"]
    further_keys = "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "norm_topk_prob"
    for key in (*list(full_config)[1:], *further_keys):
        raw = {name: value for name, value in full_config.items() if name != key}
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
