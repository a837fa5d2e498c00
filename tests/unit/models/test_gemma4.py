"""Gemma 4: its config.json as released and as transformers writes it, sizes, costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.models.families import count_forward_flops, measure_tensors, parse_model_shape
from megatron_grpo.models.shape import HeadShape
from megatron_grpo.planning.generation_cost import count_kv_bytes_per_token, count_mixer_parameters
from megatron_grpo.preflight.layout_checks import _find_undivided
from megatron_grpo.trainer.microbatch_schedule import derive_cost
from tests.support.released_configs import GEMMA4_26B, GEMMA4_31B

LAYERS = 60


def test_released_models_are_read() -> None:
    dense, mixture = parse_model_shape(GEMMA4_31B), parse_model_shape(GEMMA4_26B)
    assert dense.global_heads == HeadShape(key_value_heads=4, head_dim=512, key_is_value=True)
    assert (dense.head_dim, dense.key_value_heads, dense.window, dense.logit_cap) == (256, 16, 1024, 30.0)
    assert [layer for layer, windowed in enumerate(dense.windowed) if not windowed] == list(range(5, LAYERS, 6))
    assert (dense.softmax_scale, dense.embedding_scale, dense.zero_centered_norms) == (1.0, 5376**0.5, False)
    assert (dense.rope_theta, dense.local_rope_theta) == (1e6, 1e4)
    assert dense.rope_scaling == {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    assert dense.list_kinds(0) == {"mixer", "attention", "qk_norm", "mlp", "dense"}
    assert dense.list_kinds(5) == {"mixer", "global", "key_as_value", "mlp", "dense"}
    assert mixture.experts is not None
    assert (mixture.experts.count, mixture.experts.top_k, mixture.experts.shared_ffn_hidden) == (128, 8, 2112)
    assert not dense.fits_transformer_engine


@pytest.mark.parametrize("raw", [GEMMA4_31B, GEMMA4_26B], ids=["dense", "mixture"])
def test_the_file_that_transformers_writes_means_the_same(raw: dict[str, Any]) -> None:
    from transformers import Gemma4TextConfig

    written = Gemma4TextConfig(**raw).to_dict()
    assert "global_head_dim" not in written
    assert parse_model_shape(written) == parse_model_shape(raw)


@pytest.mark.parametrize("raw", [GEMMA4_31B, GEMMA4_26B], ids=["dense", "mixture"])
def test_the_table_has_every_tensor_once_in_its_shape(raw: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    small = {"num_hidden_layers": 6, "layer_types": raw["layer_types"][:6], "hidden_size": 24, "intermediate_size": 8}
    small |= {"num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 2, "vocab_size": 37}
    small |= {"head_dim": 4, "global_head_dim": 10, "vocab_size_per_layer_input": 37}
    config = Gemma4TextConfig(**(raw | small))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = parse_model_shape(config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]})
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert measure_tensors(shape) == stored


def test_tensor_parallelism_has_to_divide_both_kinds_of_heads() -> None:
    shape = parse_model_shape(GEMMA4_31B)
    assert [size for size in (1, 2, 4, 8, 16, 32) if _find_undivided(size, shape, is_engine=False) is None] == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    three = replace(shape, global_heads=HeadShape(key_value_heads=1, head_dim=6, key_is_value=True))
    assert _find_undivided(4, three, is_engine=False) == "198 rows of a key/value head, which 4 ranks would share"
    assert _find_undivided(4, three, is_engine=True) is None, "an engine's ranks have the whole key"


def test_keys_values_and_matrices_are_counted_by_layer() -> None:
    shape = parse_model_shape(GEMMA4_31B)
    assert count_kv_bytes_per_token(shape, LAYERS, 1, 2) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert count_kv_bytes_per_token(shape, LAYERS, 8, 2) == 2 * 2 * (50 * 2 * 256 + 10 * 512)
    assert count_mixer_parameters(shape, 0, 1) == 5376 * 256 * (2 * 32 + 2 * 16)
    assert count_mixer_parameters(shape, 5, 1) == 5376 * 512 * (2 * 32 + 4)


@pytest.mark.parametrize("window", [1, 512])
def test_a_sequence_costs_what_it_computes(window: int) -> None:
    shape = replace(parse_model_shape(GEMMA4_31B), window=window)
    lengths = [1, 2, 3, 511, 512, 513, 514, 5000]
    costs = derive_cost(shape).compute(np.array(lengths))
    np.testing.assert_allclose(costs, [count_forward_flops(shape, [length]) for length in lengths], rtol=1e-12)


def test_products_of_queries_and_keys_are_those_of_each_kind_of_layer() -> None:
    shape = parse_model_shape(GEMMA4_31B)
    pairs = count_forward_flops(shape, [2]) - 2 * count_forward_flops(shape, [1])
    assert pairs == 2 * 32 * 2 * (50 * 256 + 10 * 512)
