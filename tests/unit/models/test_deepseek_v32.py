"""DeepSeek-V3.2 and GLM-5: config.json as it is released, which layers have an indexer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GlmMoeDsaConfig

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import is_carried
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.planning.generation_cost import count_kv_bytes_per_token
from megatron_grpo.preflight.engine_checks import find_engine_problems
from megatron_grpo.preflight.layout_checks import check_engines
from tests.support.hf_configs import config_folder

DEEPSEEK = json.loads((config_folder("deepseek-ai/DeepSeek-V3.2") / "config.json").read_text())
GLM = json.loads((config_folder("zai-org/GLM-5") / "config.json").read_text())
LAYERS = GLM["num_hidden_layers"]


def test_what_released_files_say() -> None:
    deepseek, glm = parse_model_shape(DEEPSEEK), parse_model_shape(GLM)
    assert (deepseek.indexer.heads, deepseek.indexer.head_dim, deepseek.indexer.top_k) == (64, 128, 2048)
    assert (glm.indexer.heads, glm.indexer.interleaved_rope, deepseek.indexer.interleaved_rope) == (32, True, False)
    assert all(deepseek.indexer.layers)
    assert all(glm.indexer.layers)
    assert (glm.norm_eps, glm.latent.norm_eps) == (1e-5, 1e-6), "transformers' norms of short vectors have their own"


@pytest.mark.parametrize("raw", [DEEPSEEK, GLM], ids=["deepseek", "glm"])
def test_what_config_json_leaves_out_is_what_transformers_takes(raw: dict[str, Any]) -> None:
    basic_keys = ("model_type", "num_hidden_layers", "scoring_func", "topk_method", "indexer_rope_interleave")
    short = {key: raw[key] for key in basic_keys if key in raw}
    filled = AutoConfig.for_model(**short).to_dict() | {"architectures": raw["architectures"]}
    names = ("index_n_heads", "index_head_dim", "index_topk", "q_lora_rank", "n_group", "topk_group", "rms_norm_eps")
    names = (*names, "first_k_dense_replace", "routed_scaling_factor", "max_position_embeddings", "layer_types")
    assert parse_model_shape({key: value for key, value in filled.items() if key not in names}) == parse_model_shape(
        filled
    )


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_no_library_reads_the_length_of_heads_of_glm(head_dim: int, tmp_path: Path) -> None:
    """GLM-5 states the rotated part, GLM-5.2 the part without rotation; others the sum."""
    from vllm.transformers_utils.config import get_config  # here: vLLM takes long to import

    file = tmp_path / "config.json"
    file.write_text(json.dumps(GLM | {"head_dim": head_dim}))
    assert read_model_shape(tmp_path) == parse_model_shape(GLM)
    readers = (AutoConfig.from_pretrained(tmp_path), get_config(tmp_path, trust_remote_code=False))
    assert {config.head_dim for config in readers} == {GLM["qk_rope_head_dim"]}
    file.write_text(json.dumps(GLM | {"head_dim": None}))
    with pytest.raises(ValueError, match="head_dim=null is not supported"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_freq": 3},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "F" + "S" * (LAYERS - 2) + "F"},
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(keys: dict[str, Any]) -> None:
    types = GlmMoeDsaConfig(**{**GLM, **keys}).indexer_types
    indexer = parse_model_shape(GLM | keys).indexer
    assert indexer.layers == tuple(kind == "full" for kind in types)
    assert parse_model_shape(GLM | keys | {"indexer_types": types}).indexer == indexer
    sources = [indexer.find_source(layer) for layer in range(LAYERS)]
    assert all(indexer.layers[source] and source <= layer for layer, source in enumerate(sources))
    assert sources == sorted(sources)


def test_operations_beyond_the_chosen_tokens_are_those_of_the_indexer() -> None:
    """From one length to another, both with more tokens than are chosen."""
    shape, short, long = parse_model_shape(DEEPSEEK), 4096, 5000
    assert shape.latent is not None
    pairs = [sum(range(1, length + 1)) for length in (short, long)]
    chosen = [sum(min(position, 2048) for position in range(1, length + 1)) for length in (short, long)]
    products = 61 * 64 * 128 * (pairs[1] - pairs[0]) + 61 * 128 * (192 + 128) * (chosen[1] - chosen[0])
    per_token = (count_forward_flops(shape, [1, 1]) - count_forward_flops(shape, [1])) - 2 * 61 * (
        64 * 128 + 128 * (192 + 128)
    )
    expected = 2 * products + (long - short) * per_token
    assert count_forward_flops(shape, [long]) - count_forward_flops(shape, [short]) == pytest.approx(expected)


def test_indexers_of_layers_that_share_a_choice_are_carried() -> None:
    shared = parse_model_shape(GLM | {"index_topk_pattern": "FS" * (LAYERS // 2)})
    names = [f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in range(LAYERS)]
    assert [is_carried(name, shared) for name in names] == [False, True] * (LAYERS // 2)
    assert not any(is_carried(name, parse_model_shape(GLM)) for name in names)
    assert not is_carried("model.layers.1.self_attn.kv_b_proj.weight", shared)


def test_an_engines_cache_holds_the_indexers_keys() -> None:
    all_layers, half = parse_model_shape(GLM), parse_model_shape(GLM | {"index_topk_pattern": "FS" * (LAYERS // 2)})
    latent = 2 * (512 + 64)
    assert count_kv_bytes_per_token(all_layers, LAYERS, 8, 2) == LAYERS * (latent + 132)
    assert count_kv_bytes_per_token(half, 10, 8, 2) == 10 * latent + 5 * 132


def test_engines_need_gpus() -> None:
    config = Config()
    config.policy.model.path = "m"
    shape = parse_model_shape(GLM)
    (problem,) = find_engine_problems(config, shape)
    assert problem.subject == "policy.model.path=m"
    assert problem.text.startswith("is a glm_moe_dsa model, whose sparse attention vLLM has on GPUs alone")
    config.debug.rollouts_from = "recorded"
    assert not list(find_engine_problems(config, shape))


def test_engines_with_shared_choices_have_one_stage() -> None:
    config = Config()
    config.generation.parallel.pipeline = 2
    shared = parse_model_shape(GLM | {"index_topk_freq": 2})
    broken = [text for is_broken, _, text in check_engines(config, shared) if is_broken]
    assert broken == [
        "layers of this glm_moe_dsa share an indexer's choice, which vLLM does not send to other ranks; use 1"
    ]
    assert not any(is_broken for is_broken, _, _ in check_engines(config, parse_model_shape(GLM)))
