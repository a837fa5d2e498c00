"""Arguments of engines on a CPU that depend on the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.cpu_engine import make_cpu_arguments
from megatron_grpo.generation.engine_arguments import VllmSettings


@pytest.mark.parametrize(
    ("model", "is_cached"),
    [
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen3_5_text", "linear_key_head_dim": 128}, False),
        ({"model_type": "qwen3_5", "text_config": {"linear_key_head_dim": 128}}, False),
        ({"model_type": "nemotron_h", "ssm_state_size": 128}, False),
    ],
)
def test_states_of_prefixes_are_not_cached(model: dict[str, Any], is_cached: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = VllmSettings(
        model_path=str(tmp_path), config=GenerationConfig(), precision="bfloat16", max_total_sequence_length=8
    )
    assert make_cpu_arguments(settings).get("enable_prefix_caching", True) == is_cached


@pytest.mark.parametrize(
    ("model", "backend"),
    [({"model_type": "qwen3"}, None), ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "CPU_MLA")],
)
def test_latent_attention_is_computed_in_every_dtype(
    model: dict[str, Any], backend: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = VllmSettings(
        model_path=str(tmp_path), config=GenerationConfig(), precision="float32", max_total_sequence_length=8
    )
    arguments = make_cpu_arguments(settings)
    assert arguments.get("attention_backend") == backend
    assert arguments.get("compilation_config") == (backend and {"custom_ops": ["-rotary_embedding"]})
