"""The config.json files of models in tests/data: sizes without weights."""

import json
from pathlib import Path
from typing import Any

import yaml

_DATA = Path(__file__).parents[1] / "data"
_FOLDER = _DATA / "hf_configs"
PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load((_DATA / "published_models.yaml").read_text())
"""The folder and the number of parameters of models, by the path in recipes."""


def read_configs(name: str) -> dict[str, Any]:
    """The sections of tests/data/NAME.yaml, with config.json files of models or parts of them."""
    sections: dict[str, Any] = yaml.safe_load((_DATA / f"{name}.yaml").read_text())
    return sections


QWEN3_MOE: dict[str, Any] = read_configs("model_configs")["qwen3_moe"]


def config_folder(hub_name: str) -> Path:
    """The folder with a released model's config.json; KeyError: there is none."""
    return _FOLDER / PUBLISHED[hub_name]["folder"]


def read_released(name: str) -> dict[str, Any]:
    """The contents of a folder's config.json."""
    raw: dict[str, Any] = json.loads((_FOLDER / name / "config.json").read_text())
    return raw


def list_released() -> list[str]:
    """The names of all folders."""
    return sorted(folder.name for folder in _FOLDER.iterdir())
