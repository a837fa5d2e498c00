"""Mistral, Ministral 3 and Seed-OSS: what a config.json leaves out, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import Ministral3Config, MistralConfig, SeedOssConfig

from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.shape import QueryScale

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
SHORT: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], **SIZES, "num_attention_heads": 8, "sliding_window": None},
    "ministral3": {"architectures": ["Ministral3ForCausalLM"], **SIZES, "num_attention_heads": 8},
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], **SIZES, "num_attention_heads": 8},
}
CONFIGS = {"mistral": MistralConfig, "ministral3": Ministral3Config, "seed_oss": SeedOssConfig}
ROTARY = Ministral3Config().rope_parameters


@pytest.mark.parametrize("family", SHORT)
def test_what_config_json_leaves_out_is_what_transformers_takes(family: str) -> None:
    short = SHORT[family]
    filled = CONFIGS[family](**short).to_dict()
    assert parse_model_shape(short) == parse_model_shape({**filled, "architectures": short["architectures"]})


def test_queries_of_ministral_3_grow() -> None:
    shape = parse_model_shape(SHORT["ministral3"])
    assert shape.query_scale == QueryScale(slope=0.1, length=16384)
    assert shape.softmax_scale == pytest.approx(128**-0.5)  # both factors of YaRN are equal
    rope = {**ROTARY, "mscale": None, "mscale_all_dim": None}
    shape = parse_model_shape({**SHORT["ministral3"], "rope_parameters": rope})
    assert shape.softmax_scale == pytest.approx(128**-0.5 * (0.1 * math.log(16) + 1) ** 2)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096 is not supported for mistral"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias=true is not supported for seed_oss"),
        ("seed_oss", {"attention_bias": False}, "attention_bias=false is not supported for seed_oss"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias=true"),
        ("ministral3", {"sliding_window": 128}, "sliding_window=128 is not supported for ministral3"),
        ("ministral3", {"rope_parameters": {**ROTARY, "llama_4_scaling_beta": None}}, "has no llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": {**ROTARY, "mscale": 0}}, "give mscale and mscale_all_dim, or neither"),
        ("ministral3", {"rope_parameters": {**ROTARY, "attention_factor": 1.2}}, "without attention_factor"),
    ],
)
def test_what_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model_shape(SHORT[family] | change)


def test_a_window_has_to_be_written() -> None:
    with pytest.raises(ValueError, match="has no sliding_window, for which transformers takes 4096"):
        parse_model_shape({key: value for key, value in SHORT["mistral"].items() if key != "sliding_window"})
