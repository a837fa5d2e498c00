"""GLM, Kimi-K2, Phi, OLMo 3 and MiniMax-M2: config.json as it is released, what is refused, small copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import FAMILIES, count_forward_flops, find_model_type, parse_model_shape
from megatron_grpo.models.families.full_width import FAMILIES as FULL_WIDTH
from megatron_grpo.models.families.glm import FAMILIES as GLM
from megatron_grpo.models.families.phi import FAMILY as PHI
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.model_file_checks import find_tokenizer_problems
from megatron_grpo.trainer.hf_export import find_changed_settings
from megatron_grpo.trainer.model.attention import compute_scaled_rope
from megatron_grpo.verification.oracle import Oracle
from megatron_grpo.verification.problem import SMALL, TINY, prepare_model
from tests.support.released_configs import (
    BILLIONS,
    GLM_4_5,
    GLM_4_5_AIR,
    GLM_4_9B,
    KIMI_K2,
    MINIMAX_M2,
    MOONLIGHT,
    OLMO_3_7B,
    PHI_4,
    PHI_4_MINI,
    SUPER,
)
from tests.unit.models.test_expert_families import parameters

NAMES = tuple(family.name for family in (*GLM, PHI, *FULL_WIDTH))


@pytest.mark.parametrize("name", BILLIONS)
def test_the_table_covers_the_parameters_of_the_released_models(name: str) -> None:
    raw, billions = BILLIONS[name]
    assert parameters(raw) / 1e9 == pytest.approx(billions, rel=5e-4)


def test_what_released_files_say() -> None:
    glm, air, dense = map(parse_model_shape, (GLM_4_5, GLM_4_5_AIR, GLM_4_9B))
    assert (glm.rotated_dim, glm.interleaved_rope, glm.qkv_bias, glm.qk_norm, air.qk_norm) == (
        64,
        False,
        True,
        True,
        False,
    )
    assert glm.experts is not None
    assert (sum(glm.experts.layers), glm.experts.scaling, glm.experts.shared_ffn_hidden) == (89, 2.5, 1536)
    assert (dense.rotated_dim, dense.interleaved_rope, dense.post_norms, dense.qkv_bias) == (64, True, True, True)
    kimi = parse_model_shape(KIMI_K2)
    assert kimi.family == "deepseek_v3"
    assert kimi.softmax_scale == pytest.approx(192**-0.5 * (0.1 * torch.tensor(32.0).log().item() + 1) ** 2)
    olmo = parse_model_shape(OLMO_3_7B)
    assert [layer for layer, windowed in enumerate(olmo.windowed) if not windowed] == list(range(3, 32, 4))
    assert (olmo.window, olmo.local_rope_theta, olmo.pre_norms, olmo.full_width_qk_norm) == (4096, 5e5, False, True)
    assert compute_scaled_rope(olmo)[1] == 1.2079441541679836
    minimax = parse_model_shape(MINIMAX_M2)
    assert minimax.experts is not None
    assert (minimax.rotated_dim, minimax.experts.ffn_hidden, minimax.experts.scaling) == (64, 1536, 1.0)


def test_longrope_counts_up_to_the_length_of_the_first_training() -> None:
    """Beyond it vLLM and transformers choose the long factors by different rules."""
    shape = parse_model_shape(PHI_4_MINI)
    assert (shape.max_positions, shape.rotated_dim, shape.window) == (4096, 96, None)
    frequencies, factor = compute_scaled_rope(shape)
    torch.testing.assert_close(frequencies, 1.0 / 1e4 ** (torch.arange(0, 96, 2) / 96))
    assert factor == pytest.approx((1 + torch.tensor(32.0).log() / torch.tensor(4096.0).log()).sqrt().item())


def test_a_window_longer_than_the_positions_is_none() -> None:
    assert parse_model_shape(PHI_4 | {"sliding_window": 16384}).window is None
    windowed = parse_model_shape(PHI_4 | {"sliding_window": 2047})
    assert (windowed.window, windowed.windowed) == (2047, (True,) * 40)


THETAS = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e4}}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GLM_4_5, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported for glm4_moe"),
    (GLM_4_5, {"tie_word_embeddings": True}, "tie_word_embeddings=true is not supported for glm4_moe"),
    (GLM_4_5, {"partial_rotary_factor": None}, "partial_rotary_factor=null is not supported"),
    (GLM_4_5, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 rotates 192 of the 128 features"),
    (GLM_4_5, {"partial_rotary_factor": 0.26}, "partial_rotary_factor=0.26 rotates 33 of the 128 features"),
    (GLM_4_5, {"rotary_pct": 0.5}, "rotary_pct=0.5 is not supported; write partial_rotary_factor"),
    (GLM_4_5, {"n_group": 8, "topk_group": 2}, "n_group=8 with topk_group=2 and num_experts_per_tok=8"),
    (GLM_4_5, {"sliding_window": 4096}, "sliding_window=4096 is not supported for glm4_moe"),
    (GLM_4_9B, {"attention_bias": None}, "attention_bias=null must be true or false"),
    (GLM_4_9B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn is not supported"),
    (GLM_4_9B, {"model_type": "glm4_moe"}, "model_type=glm4_moe is not that of Glm4ForCausalLM"),
    (KIMI_K2, {"model_type": "kimi_k3"}, "model_type=kimi_k3 is not that of DeepseekV3ForCausalLM"),
    (PHI_4_MINI, {"partial_rotary_factor": 1.0}, "short_factor=.* must be 64 numbers above 0"),
    (PHI_4_MINI, {"head_dim": 64}, "head_dim=64 is not hidden_size / num_attention_heads"),
    (PHI_4, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type=yarn is not supported"),
    (PHI_4, {"layer_types": ["sliding_attention"] * 40}, "layer_types with sliding_attention is not supported"),
    (OLMO_3_7B, {"rope_theta": 1e6}, "rope_theta=1000000.0 is not supported for olmo3"),
    (OLMO_3_7B, {"attention_bias": True}, "attention_bias=true is not supported for olmo3"),
    (OLMO_3_7B, {"layer_types": ["full_attention"]}, "for each of 32 layers"),
    (OLMO_3_7B, {"rope_scaling": OLMO_3_7B["rope_scaling"] | {"truncate": False}}, "truncate=False of the rotary"),
    (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func=softmax is not supported for minimax_m2"),
    (MINIMAX_M2, {"use_routing_bias": None}, "use_routing_bias=null is not supported for minimax_m2"),
    (MINIMAX_M2, {"rotary_dim": None}, "rotary_dim is missing"),
    (MINIMAX_M2, {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 contradicts rotary_dim=64"),
]
for _key, _value in {"factor": 16.0, "attention_factor": 1.0, "short_mscale": 1.1}.items():
    REFUSED.append(
        (PHI_4_MINI, {"rope_scaling": PHI_4_MINI["rope_scaling"] | {_key: _value}}, f"{_key}={_value} is not")
    )


@pytest.mark.parametrize(("raw", "change", "message"), REFUSED)
def test_what_is_refused(raw: dict[str, Any], change: dict[str, Any], message: str) -> None:
    parse_model_shape(raw)
    with pytest.raises(ValueError, match=message):
        parse_model_shape(raw | change)


def test_glm_needs_the_size_of_a_head() -> None:
    with pytest.raises(ValueError, match="has no head_dim, without which vLLM does not load"):
        parse_model_shape({key: value for key, value in GLM_4_5.items() if key != "head_dim"})


@pytest.mark.parametrize("family", NAMES)
def test_what_config_json_leaves_out_is_what_transformers_takes(family: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32}
    needed = {key: MINIMAX_M2[key] for key in ("scoring_func", "use_routing_bias", "rotary_dim")}
    short = sizes | {"vocab_size": 61, "model_type": family} | (needed if family == "minimax_m2" else {})
    short |= {"head_dim": 16} if family == "glm4_moe" else {}
    short |= {"num_key_value_heads": 32} if family in ("phi3", "olmo3") else {}
    architectures = {"architectures": [FAMILIES[family].architecture]}
    filled = AutoConfig.for_model(**short).to_dict()
    assert parse_model_shape({**architectures, **short}) == parse_model_shape({**filled, **architectures})


@pytest.mark.parametrize("name", BILLIONS)
def test_small_copies_of_released_models(name: str, tmp_path: Path) -> None:
    """They are read as transformers reads them, in frequencies and in tensors."""
    (tmp_path / "config.json").write_text(json.dumps(BILLIONS[name][0]))
    folder = prepare_model(str(tmp_path), True, tmp_path / "small", seed=0)
    oracle = Oracle(folder)
    shape, released = parse_model_shape(json.loads((folder / "config.json").read_text())), BILLIONS[name][0]
    rotary = oracle.model.model.rotary_emb
    inverse = rotary.full_attention_inv_freq if shape.windowed and shape.pre_norms is False else rotary.inv_freq
    torch.testing.assert_close(read_frequencies(shape), inverse)
    assert (shape.rope_scaling is None) == (parse_model_shape(released).rope_scaling is None)
    assert len(oracle.routers) == (0 if shape.experts is None else sum(shape.experts.layers))


def read_frequencies(shape: ModelShape) -> torch.Tensor:
    if shape.rope_scaling is not None:
        return compute_scaled_rope(shape)[0]
    rotated = shape.rotated_dim or shape.head_dim
    return 1.0 / shape.rope_theta ** (torch.arange(0, rotated, 2).float() / rotated)


@pytest.mark.parametrize("family", NAMES)
def test_operations_are_those_that_torch_counts(family: str) -> None:
    """All but attention's squares, and the look-up of a token's experts."""
    raw = {"model_type": family, **SMALL, **TINY[family]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    shape = parse_model_shape(raw | {"architectures": [FAMILIES[family].architecture]})
    length, limits = 9, [shape.window if has else 9 for has in shape.windowed or (False,) * shape.layers]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    visible = sum(min(query + 1, limit or 9) for query in range(length) for limit in limits)
    hidden = shape.layers * length**2 - visible
    assert count_forward_flops(shape, [length]) == counter.get_total_flops() - 4 * 4 * 16 * hidden


@pytest.mark.parametrize(
    "raw", [GLM_4_5, KIMI_K2, MOONLIGHT, PHI_4_MINI, MINIMAX_M2, SUPER], ids=lambda raw: raw["model_type"]
)
def test_an_export_needs_no_code_of_the_model(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")  # and no layer for further tokens
    exported = raw | find_changed_settings(tmp_path, parse_model_shape(raw))
    (tmp_path / "config.json").write_text(json.dumps(exported))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(config) is type(AutoConfig.for_model(find_model_type(raw)))
    assert not exported.get("auto_map")
    assert not {exported.get("num_nextn_predict_layers"), exported.get("num_mtp_modules")} - {None, 0}


def test_a_tokenizer_of_code_is_named(tmp_path: Path) -> None:
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "chat_template": "{{ 1 }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    def find() -> list[Problem]:
        return list(find_tokenizer_problems("policy.model.path=kimi", tmp_path, Config(), vocab=8))

    (problem,) = find()
    assert "the tokenizer is code of the model" in problem.text
    assert "tokenizer.json first, as docs/layouts.md shows" in problem.text
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find() == []
