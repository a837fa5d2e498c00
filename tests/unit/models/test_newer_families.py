"""GLM, Kimi-K2, Phi, OLMo 3, MiniMax-M2 and Ministral 3: config.json as it is released, small copies, costs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, Ministral3Config

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import find_model_type, parse_model_shape
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.models.shape import ModelShape, QueryScale
from megatron_grpo.preflight.model_file_checks import find_tokenizer_problems
from megatron_grpo.trainer.hf_export import find_changed_settings
from megatron_grpo.trainer.model.attention import compute_scaled_rope
from megatron_grpo.verification.oracle import Oracle
from megatron_grpo.verification.problem import SMALL, TINY, prepare_model
from tests.support.hf_configs import read_released
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
from tests.support.tiny_models import SPECIAL
from tests.unit.models.test_released_models import NEWER, make_short


def test_what_released_files_say() -> None:
    glm, air, dense = map(parse_model_shape, (GLM_4_5, GLM_4_5_AIR, GLM_4_9B))
    assert (glm.rotated_dim, glm.interleaved_rope, glm.qkv_bias) == (64, False, True)
    assert (glm.qk_norm, air.qk_norm) == (True, False)
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


@pytest.mark.parametrize("family", NEWER)
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


def test_which_layers_have_experts() -> None:
    assert sum(parse_model_shape(read_released("deepseek_v3")).experts.layers) == 58
    sparse = parse_model_shape(
        read_released("qwen3_30b_a3b") | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    ).experts
    assert [layer for layer, has in enumerate(sparse.layers) if has][:3] == [3, 5, 7]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_operations_of_experts_are_those_that_torch_counts(family: str) -> None:
    """All but attention's, which torch counts for a whole square, and the look-up of a token's experts."""
    model = SPECIAL[family]().eval()
    model.set_experts_implementation("eager")  # torch does not count products of groups of matrices
    shape = parse_model_shape(model.config.to_dict() | {"architectures": [type(model).__name__]})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    latent = shape.latent
    per_pair = 4 * shape.head_dim if latent is None else 2 * (latent.plain_dim + latent.rope_dim + latent.value_dim)
    attention = shape.layers * shape.attention_heads * per_pair
    assert count_forward_flops(shape, [1]) - attention == pytest.approx(counter.get_total_flops() - attention, rel=0.02)


def test_queries_of_ministral_3_grow() -> None:
    shape = parse_model_shape(make_short("ministral3"))
    assert shape.query_scale == QueryScale(slope=0.1, length=16384)
    assert shape.softmax_scale == pytest.approx(128**-0.5)  # both factors of YaRN are equal
    rope = {**Ministral3Config().rope_parameters, "mscale": None, "mscale_all_dim": None}
    shape = parse_model_shape({**make_short("ministral3"), "rope_parameters": rope})
    assert shape.softmax_scale == pytest.approx(128**-0.5 * (0.1 * math.log(16) + 1) ** 2)
