"""Settings of config.json that no layer computes, or that libraries read in two ways, are refused by name."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Ministral3Config

from megatron_grpo.models.families.reading import parse_model_shape
from tests.support.hf_configs import read_released
from tests.support.released_configs import GEMMA3_1B as GEMMA3
from tests.support.released_configs import (
    GEMMA4_31B,
    GLM_4_5,
    GLM_4_9B,
    KIMI_K2,
    LLAMA4_MAVERICK,
    MINIMAX_M2,
    NANO,
    OLMO_3_7B,
    PHI_4,
    PHI_4_MINI,
    QWEN3_5_27B,
)
from tests.unit.models.test_config_json import BASE
from tests.unit.models.test_qwen3_5 import CLASSES, as_text
from tests.unit.models.test_released_models import NAMED_ALONE, make_short
from tests.unit.models.test_spellings import OF_FAMILY, config_of

LEFT_OUT = "(left out)"
CONFIGS: dict[str, dict[str, Any]] = {
    "two layers": BASE,
    **{f"small {family}": config_of(family) for family in OF_FAMILY},
    **{family: make_short(family) for family in NAMED_ALONE},
    "ministral3": make_short("ministral3") | {"rope_parameters": Ministral3Config().rope_parameters},
    **{family: as_text(family) for family in CLASSES},
    "qwen3_5 with images": QWEN3_5_27B,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4_31B,
    "llama4": LLAMA4_MAVERICK,
    "nemotron_h": NANO,
    "glm4_moe": GLM_4_5,
    "glm4": GLM_4_9B,
    "kimi_k2": KIMI_K2,
    "phi3": PHI_4_MINI,
    "phi3 of 14 B": PHI_4,
    "olmo3": OLMO_3_7B,
    "minimax_m2": MINIMAX_M2,
    "qwen3_moe": read_released("qwen3_30b_a3b"),
    "deepseek_v3": read_released("deepseek_v3"),
    "deepseek_v32": read_released("deepseek_v3_2"),
    "glm_moe_dsa": read_released("glm_5"),
    "gpt_oss": read_released("gpt_oss_20b"),
}
"""The config.json files that the table changes."""


def read_table() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Rows of refused_configs.txt: a file of CONFIGS, keys of it with other values, and what the message says.

    A line "= NAME" begins the rows of a file, each "KEYS  =>  REGULAR EXPRESSION"; lines that are indented go on with
    the row before. In KEYS, which are YAML, "(left out)" takes a key out, a dot leads to a key one level down, and
    "3 * word" is the word three times.
    """
    name = ""
    for line in Path(__file__).with_name("refused_configs.txt").read_text().replace("\n    ", " ").splitlines():
        if line.startswith("= "):
            name = line.removeprefix("= ")
        elif line:
            keys, _, message = line.partition("=>")
            yield name, repeat_words(yaml.safe_load(f"{{{keys}}}")), message.strip()


def repeat_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: repeat_words(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    counted = [(item, re.fullmatch(r"(\d+) \* (\w+)", str(item))) for item in value]
    return [word for item, match in counted for word in ([match[2]] * int(match[1]) if match else [item])]


def change_keys(raw: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    changed = deepcopy(raw)
    for path, value in change.items():
        *outer, key = path.split(".")
        part = changed
        for name in outer:
            part = part[name]
        if value == LEFT_OUT:
            del part[key]
        else:
            part[key] = value
    return changed


@pytest.mark.parametrize(("name", "change", "message"), read_table())
def test_what_is_refused_is_named(name: str, change: dict[str, Any], message: str) -> None:
    parse_model_shape(CONFIGS[name])
    with pytest.raises(ValueError, match=message):
        parse_model_shape(change_keys(CONFIGS[name], change))
