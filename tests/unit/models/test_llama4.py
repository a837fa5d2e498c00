"""Llama 4: its config.json as released and as transformers writes it, options without support, costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_grpo.models.families import build_weight_map, count_forward_flops, measure_tensors, parse_model_shape
from megatron_grpo.models.weight_map import iter_entries
from megatron_grpo.trainer.microbatch_schedule import derive_cost
from tests.support.released_configs import LLAMA4_MAVERICK, LLAMA4_SCOUT


def test_released_models_are_read() -> None:
    scout, maverick = parse_model_shape(LLAMA4_SCOUT), parse_model_shape(LLAMA4_MAVERICK)
    assert scout.experts is not None
    assert maverick.experts is not None
    assert (scout.window, scout.chunked, scout.unweighted_qk_norm) == (8192, True, True)
    assert scout.unrotated == maverick.unrotated == (False, False, False, True) * 12
    assert (sum(scout.experts.layers), sum(maverick.experts.layers)) == (48, 24)
    assert maverick.list_kinds(0) == {"mixer", "attention", "mlp", "dense"}
    assert maverick.list_kinds(3) == {"mixer", "attention", "unrotated", "mlp", "experts", "packed_experts"}
    assert (maverick.ffn_hidden, maverick.experts.ffn_hidden, maverick.experts.shared_ffn_hidden) == (16384, 8192, 8192)
    assert not scout.fits_transformer_engine


@pytest.mark.parametrize(("raw", "billions"), [(LLAMA4_SCOUT, 107.8), (LLAMA4_MAVERICK, 400.7)])
def test_parameters_are_as_many_as_published_without_those_for_images(raw: dict[str, Any], billions: float) -> None:
    shape = parse_model_shape(raw)
    numbers = sum(int(np.prod(size)) for size in measure_tensors(shape).values())
    assert numbers / 1e9 == pytest.approx(billions, abs=0.1)


def test_what_config_json_leaves_out_is_what_transformers_takes() -> None:
    from transformers import Llama4TextConfig

    sizes = {"architectures": ["Llama4ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 99}
    short = {**sizes, "num_attention_heads": 8, "intermediate_size": 48}
    assert parse_model_shape(short) == parse_model_shape(Llama4TextConfig(**short).to_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported for llama4; only 1 is"),
        ({"moe_layers": [0, 1]}, r"moe_layers=\[0, 1\] is not every layer of interleave_moe_layer_step=2"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=.* must have 0 or 1 for each of 48 layers"),
        ({"layer_types": ["full_attention"] * 48}, "layer_types must be chunked_attention in rotated layers"),
        ({"layer_types": ["sliding_attention"] * 48}, "must have chunked_attention or full_attention"),
        ({"attention_chunk_size": None}, "attention_chunk_size=null is not supported"),
        ({"attn_temperature_tuning": 4}, "attn_temperature_tuning=4 must be true or false"),
        ({"attention_bias": True}, "attention_bias=true is not supported for llama4"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn is not supported"),
        ({"model_type": "llama"}, "model_type=llama is not that of Llama4ForCausalLM"),
    ],
)
def test_unsupported_options_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model_shape(LLAMA4_MAVERICK | change)


def test_the_table_has_every_tensor_once_in_its_shape() -> None:
    import torch
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    small = {"num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 8, "intermediate_size_mlp": 12}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37, "moe_layers": [1, 3]}
    config = Llama4TextConfig(**(LLAMA4_MAVERICK | small | heads | {"no_rope_layers": None, "pad_token_id": 0}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = parse_model_shape(config.to_dict() | {"architectures": ["Llama4ForCausalLM"]})
    assert measure_tensors(shape) == {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert len(list(iter_entries(build_weight_map(shape), shape, range(4)))) > 0


@pytest.mark.parametrize("window", [1, 2, 512])
def test_a_sequence_costs_what_it_computes(window: int) -> None:
    shape = replace(parse_model_shape(LLAMA4_MAVERICK), window=window)
    lengths = [1, 2, 3, 511, 512, 513, 514, 1025, 5000]
    costs = derive_cost(shape).compute(np.array(lengths))
    np.testing.assert_allclose(costs, [count_forward_flops(shape, [length]) for length in lengths], rtol=1e-12)


def test_chunks_make_their_own_pairs_of_tokens() -> None:
    shape = replace(parse_model_shape(LLAMA4_MAVERICK), window=4)
    all_visible = replace(shape, window=10**6)
    visible = sum(position % 4 + 1 for position in range(11))
    pairs = (count_forward_flops(all_visible, [11]) - count_forward_flops(shape, [11])) / (2 * 40 * 2 * 128 * 36)
    assert pairs == 66 - visible
