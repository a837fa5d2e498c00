"""Keys that a config.json leaves out have the values that transformers gives them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from megatron_grpo.models.families import FAMILIES, parse_model_shape
from megatron_grpo.models.families.full_width import FAMILIES as FULL_WIDTH
from megatron_grpo.models.families.glm import FAMILIES as GLM
from megatron_grpo.models.families.phi import FAMILY as PHI
from tests.support.released_configs import MINIMAX_M2

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
    whole = AutoConfig.for_model(FAMILIES[family].model_type or family, **short).to_dict()
    assert parse_model_shape(short) == parse_model_shape(whole | {"architectures": short["architectures"]})
