"""The config.json files of released models in tests/data/hf_configs: sizes without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HF_CONFIGS = {
    "Qwen/Qwen3-0.6B": "qwen3_0_6b",
    "Qwen/Qwen3-1.7B": "qwen3_1_7b",
    "Qwen/Qwen3-8B": "qwen3_8b",
    "models/Qwen3-8B-YaRN": "qwen3_8b_yarn",
    "Qwen/Qwen3-32B": "qwen3_32b",
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3_235b_a22b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3_1_8b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3_3_70b",
    "unsloth/DeepSeek-V3-0324-BF16": "deepseek_v3",
    "Qwen/Qwen3.5-9B": "qwen3_5_9b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_35b_a3b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3_5_397b_a17b",
    "openai/gpt-oss-20b": "gpt_oss_20b",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "zai-org/GLM-4.5-Air": "glm_4_5_air",
    "zai-org/GLM-4.6": "glm_4_6",
    "zai-org/GLM-5": "glm_5",
    "MiniMaxAI/MiniMax-M2": "minimax_m2",
    "deepseek-ai/DeepSeek-V3.2": "deepseek_v3_2",
    "moonshotai/Kimi-K2-Instruct": "kimi_k2",
    "moonshotai/Moonlight-16B-A3B-Instruct": "moonlight_16b_a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nvidia_nemotron_3_nano",
}
"""Folders in tests/data/hf_configs by the path in recipes, most of them hub names."""

_FOLDER = Path(__file__).parents[1] / "data" / "hf_configs"


def config_folder(hub_name: str) -> Path:
    """The folder with a released model's config.json; KeyError: there is none."""
    return _FOLDER / HF_CONFIGS[hub_name]


def read_released(name: str) -> dict[str, Any]:
    """The contents of a folder's config.json."""
    raw: dict[str, Any] = json.loads((_FOLDER / name / "config.json").read_text())
    return raw


def list_released() -> list[str]:
    """The names of all folders."""
    return sorted(folder.name for folder in _FOLDER.iterdir())
