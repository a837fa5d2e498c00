"""Nulls for numbers in config.json: each is taken only where transformers takes it, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_grpo.models.families import find_model_type, parse_model_shape
from tests.support.hf_configs import read_released
from tests.support.released_configs import LLAMA4_SCOUT

FOLDERS = ("deepseek_v3", "deepseek_v3_2", "gemma_4_31b", "glm_4_5_air", "glm_5_3", "gpt_oss_20b", "llama3_1_8b")
FOLDERS += ("minimax_m2_7", "ministral_3_8b", "nvidia_nemotron_3_nano", "olmo_3_7b", "phi_4", "qwen3_30b_a3b")
FOLDERS += ("qwen3_5_9b", "qwen3_next_80b_a3b", "seed_oss_36b")


def is_taken(raw: dict[str, Any]) -> bool:
    try:
        parse_model_shape(raw)
    except ValueError:
        return False
    return True


def is_taken_by_transformers(raw: dict[str, Any], folder: Path) -> bool:
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - its checks raise errors of several kinds
        return False
    return True


@pytest.mark.parametrize("name", FOLDERS)
def test_a_null_is_refused_where_transformers_refuses_it(name: str, tmp_path: Path) -> None:
    raw = read_released(name)
    text = raw.get("text_config", raw)
    taken = []
    for key in (key for key, value in text.items() if isinstance(value, int | float) and not isinstance(value, bool)):
        changes = [text | {key: value} for value in (["no number"], None)]
        junk, null = ({**raw, "text_config": part} if text is not raw else part for part in changes)
        if not is_taken(junk) and is_taken(null):  # the key is read
            plain = {name: value for name, value in null.items() if name != "auto_map"}
            plain["model_type"] = find_model_type(raw)
            taken.append(key)
            assert is_taken_by_transformers(plain, tmp_path), key
    assert "hidden_size" not in taken


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (read_released("deepseek_v3"), "n_shared_experts"),  # vLLM would compute none
        (read_released("deepseek_v3"), "routed_scaling_factor"),
        (read_released("gpt_oss_20b"), "head_dim"),
        (read_released("nvidia_nemotron_3_nano"), "mamba_num_heads"),
        (LLAMA4_SCOUT, "num_key_value_heads"),
    ],
)
def test_the_message_names_the_key(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}=null is not supported; give the number, or leave the key out$"):
        parse_model_shape(raw | {key: None})
