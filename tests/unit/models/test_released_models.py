"""Released models have as many numbers as published; keys left out have the values of transformers."""

from math import prod
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_grpo.models.families import FAMILIES, build_weight_map, measure_tensors
from megatron_grpo.models.families.full_width import FAMILIES as FULL_WIDTH
from megatron_grpo.models.families.glm import FAMILIES as GLM
from megatron_grpo.models.families.phi import FAMILY as PHI
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import iter_entries
from tests.support.hf_configs import PUBLISHED, config_folder
from tests.support.released_configs import BILLIONS, GEMMA4_26B, GEMMA4_31B, LLAMA4_MAVERICK, LLAMA4_SCOUT, MINIMAX_M2


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert _parameters(read_model_shape(config_folder(name))) == PUBLISHED[name]["parameters"]


def _parameters(shape: ModelShape) -> int:
    """Numbers in all tensors of the weight map, copies of tied tensors included."""
    entries = iter_entries(build_weight_map(shape), shape, range(shape.layers))
    experts = shape.experts.count if shape.experts is not None else 1
    return sum(
        prod(tensor.measure(shape.sizes)) * (experts if "{expert}" in tensor.name else 1)
        for entry, _, _ in entries
        for tensor in entry.hf
    )


@pytest.mark.parametrize(
    ("raw", "billions", "accuracy"),
    [
        *((raw, billions, 5e-4 * billions) for raw, billions in BILLIONS.values()),
        *((raw, billions, 0.1) for raw, billions in ((GEMMA4_31B, 30.7), (GEMMA4_26B, 25.2))),
        *((raw, billions, 0.1) for raw, billions in ((LLAMA4_SCOUT, 107.8), (LLAMA4_MAVERICK, 400.7))),
    ],
)
def test_tensors_have_as_many_numbers_as_published(raw: dict[str, Any], billions: float, accuracy: float) -> None:
    numbers = sum(prod(size) for size in measure_tensors(parse_model_shape(raw)).values())
    assert numbers / 1e9 == pytest.approx(billions, abs=accuracy)


SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 99}
WIDE = SIZES | {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 32}
NAMED_ALONE = ("mistral", "ministral3", "seed_oss")
NEWER = tuple(family.name for family in (*GLM, PHI, *FULL_WIDTH))
SHORT: dict[str, dict[str, Any]] = {
    "gemma3": SIZES,
    "gemma4": SIZES | {"num_hidden_layers": 8, "hidden_size_per_layer_input": 0},
    "llama4": SIZES,
    "gpt_oss": SIZES | {"num_hidden_layers": 3},
    "nemotron_h": {"hybrid_override_pattern": "ME*-"},
    **dict.fromkeys(NAMED_ALONE, SIZES),
    "mistral": SIZES | {"sliding_window": None},
    **dict.fromkeys(NEWER, WIDE),
    "glm4_moe": WIDE | {"head_dim": 16},
    "phi3": WIDE | {"num_key_value_heads": 32},
    "olmo3": WIDE | {"num_key_value_heads": 32},
    "minimax_m2": WIDE | {key: MINIMAX_M2[key] for key in ("scoring_func", "use_routing_bias", "rotary_dim")},
}
"""The keys that a file of each family has to have."""


def make_short(family: str) -> dict[str, Any]:
    return {"architectures": [FAMILIES[family].architecture], **SHORT[family]}


@pytest.mark.parametrize("family", SHORT)
def test_what_config_json_leaves_out_is_what_transformers_takes(family: str) -> None:
    short = make_short(family)
    full_config = AutoConfig.for_model(FAMILIES[family].model_type or family, **short).to_dict()
    assert parse_model_shape(short) == parse_model_shape(full_config | {"architectures": short["architectures"]})
