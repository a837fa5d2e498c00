"""Small copies of models as their publishers and others wrote config.json: the same options, or the same refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo import verify
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.model_file_checks import find_model_problems
from megatron_grpo.verification.problem import prepare_model
from tests.support.hf_configs import list_released, read_released
from tests.support.released_configs import GEMMA3_1B as GEMMA3
from tests.support.released_configs import GLM_4_5_AIR, PHI_4_MINI

IMAGES = ("kimi_k2_5", "qwen3_vl_4b")
OPTIONS = ("family", "tied_embeddings", "rope_theta", "local_rope_theta", "qkv_bias", "qk_norm", "full_width_qk_norm")
OPTIONS += ("interleaved_rope", "attention_bias", "output_gate", "sinks", "zero_centered_norms", "pre_norms")
OPTIONS += ("post_norms", "activation", "chunked", "unweighted_qk_norm", "value_norm", "layer_scale", "logit_cap")
OF_EXPERTS = ("score", "normalised", "scaling", "selection_bias", "bias", "shared_gate", "scales_input", "beside_dense")


def write(raw: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def list_layer_kinds(shape: ModelShape) -> set[object]:
    """What the layers of a model are, each kind once; how files hold experts is no part of it."""
    flags, stored = (shape.windowed, shape.unrotated), {"packed_experts", "single_experts"}
    return {
        (shape.list_kinds(layer) - stored, *(bool(flag) and flag[layer] for flag in flags))
        for layer in range(shape.layers)
    }


def list_options(shape: ModelShape) -> dict[str, Any]:
    """What a small copy may not change."""
    options = {name: getattr(shape, name) for name in OPTIONS}
    options["windows"] = shape.window is not None
    options["one key"] = shape.key_value_heads == 1
    options["all keys"] = shape.key_value_heads == shape.attention_heads
    options["rotated"] = (shape.rotated_dim or shape.head_dim) / shape.head_dim
    rope = shape.rope_scaling or {}
    options["rope"] = {name: value for name, value in rope.items() if not isinstance(value, list | None)}
    if shape.experts is not None:
        options |= {name: getattr(shape.experts, name) for name in OF_EXPERTS}
        options["groups"] = shape.experts.groups > 1
    return options


def require_alike(raw: dict[str, Any], folder: Path) -> ModelShape:
    """Make a small copy, and compare what the two files say."""
    path = write(raw, folder / "model")
    large = read_model_shape(path)
    small = read_model_shape(prepare_model(str(path), True, folder / "small", 0))
    assert list_options(small) == list_options(large)
    if large.family != "llama4":  # whose experts stand in every n-th layer, so a short copy cannot have each pair
        assert list_layer_kinds(small) == list_layer_kinds(large)
    else:
        assert set(small.windowed) == set(large.windowed)
        assert {small.has_experts(layer) for layer in range(small.layers)} == {
            large.has_experts(layer) for layer in range(large.layers)
        }
    assert small.layers == min(large.layers, 4)
    return small


@pytest.mark.parametrize("name", [name for name in list_released() if name not in IMAGES])
def test_released_models_keep_their_options_and_kinds_of_layers(name: str, tmp_path: Path) -> None:
    require_alike(read_released(name), tmp_path)


def change(name: str, *left_out: str, **values: Any) -> dict[str, Any]:
    """A released config.json, or its text part, with other keys."""
    raw = read_released(name)
    part = raw.get("text_config", raw)
    changed = {key: value for key, value in part.items() if key not in left_out} | values
    return raw | {"text_config": changed} if "text_config" in raw else changed


SPELLINGS: dict[str, dict[str, Any]] = {
    "the first layers without experts": change("qwen3_30b_a3b", mlp_only_layers=[0, 1, 2, 3, 4]),
    "experts in every sixth layer": change("qwen3_30b_a3b", decoder_sparse_step=6),
    "no layer with experts": change("qwen3_30b_a3b", mlp_only_layers=list(range(48))),
    "no list of dense layers": change("qwen3_30b_a3b", mlp_only_layers=None),
    "experts in all layers": change("deepseek_v3", first_k_dense_replace=0),
    "experts in no layer": change("deepseek_v3", first_k_dense_replace=61),
    "dense layers by default": change("deepseek_v3", "first_k_dense_replace"),
    "dense layers of GLM by default": {k: v for k, v in GLM_4_5_AIR.items() if k != "first_k_dense_replace"},
    "indexers by frequency": change("glm_5_3", "indexer_types"),
    "attention in every sixth layer": change("qwen3_next_80b_a3b", "layer_types", full_attention_interval=6),
    "windows by a pattern": GEMMA3,
    "windows by default": {key: value for key, value in GEMMA3.items() if key != "sliding_window_pattern"},
    "windows of OLMo by default": change("olmo_3_7b", "layer_types"),
    "an odd number of alternating layers": change("gpt_oss_20b", "layer_types", num_hidden_layers=5),
    "experts in every 24th layer": change("llama4_scout", "moe_layers", interleave_moe_layer_step=24),
    "experts in every third layer": change("llama4_scout", "moe_layers", interleave_moe_layer_step=3),
    "no rotated layer": change("llama4_scout", no_rope_layers=[0] * 48),
    "LongRoPE": PHI_4_MINI,
    "two layers": change("qwen3_8b", num_hidden_layers=2),
    "as many keys as queries": change("llama3_1_8b", num_key_value_heads=32),
    "no number of keys": change("llama3_1_8b", "num_key_value_heads"),
    "null for derived sizes": change("llama3_1_8b", head_dim=None, num_key_value_heads=None),
    "new spelling of the rotary embedding": change(
        "qwen3_8b", "rope_theta", "rope_scaling", rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "a head tied outside the text part": read_released("qwen3_5_9b") | {"tie_word_embeddings": True},
    "saved again by transformers 5": change(
        "minimax_m2_7",
        "rope_theta",
        partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5},
        sliding_window=None,
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_keep_theirs(spelling: str, tmp_path: Path) -> None:
    require_alike(SPELLINGS[spelling], tmp_path)


INT4 = read_released("kimi_k2_5")["text_config"]["quantization_config"]
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "Kimi-K2.5": (read_released("kimi_k2_5"), "KimiK25ForConditionalGeneration is not supported: it reads images"),
    "Kimi-K2 in 4 bits": (change("kimi_k2", quantization_config=INT4), "(compressed-tensors): weights that are"),
    "MiniMax-M2.7 in 4 bits": (change("minimax_m2_7", quantization_config=INT4), "convert the model to bfloat16 first"),
    "MiniMax-M2.7 in NVFP4": (change("minimax_m2_7", quantization_config=NVFP4), "quantization_config (modelopt)"),
    "GLM without a flag": (change("glm_5_3", "indexer_rope_interleave"), 'add "indexer_rope_interleave": true'),
    "GLM with two schedules": (change("glm_5_3", index_topk_freq=2), 'add "index_topk_pattern": "FFFSSSF'),
    "no shared expert": (change("deepseek_v3", n_shared_experts=None), "n_shared_experts=null is not supported"),
    "no groups": (change("deepseek_v3", n_group=None), "n_group is missing"),
    "sizes by layer": (change("llama3_1_8b", intermediate_size=[14336] * 32), "must be a whole number above 0"),
    "a list of dense layers": (change("glm_5_3", first_k_dense_replace=[3]), "must be a number of layers"),
    "sizes as text": (change("llama3_1_8b", hidden_size="4096"), "hidden_size=4096 must be a whole number"),
    "sizes one level down": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "text_config": read_released("llama3_1_8b")},
        "text_config is not supported in LlamaForCausalLM; write its keys beside architectures",
    ),
    "sizes in two places": (
        read_released("qwen3_8b") | {"text_config": read_released("qwen3_0_6b")},
        "text_config is not supported in Qwen3ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_refusal_has_the_same_words_for_a_folder_its_small_copy_and_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, text = FOREIGN[name]
    folder = write(raw, tmp_path / "model")
    messages = []
    for arguments in (["shrink=true"], []):
        assert verify.main([f"model={folder}", *arguments]) == 2
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1]
    assert re.search(re.escape(text), messages[0])
    assert len(messages[0]) < 1500
    assert messages[0].count("\n") == 1
    config = compose_config(["+exp=quickstart", f"policy.model.path={folder}"])
    problems = [problem.text for problem in find_model_problems(config)]
    assert [text in problem for problem in problems] == [True]
