"""config.json of a small model of each family, in sizes that vLLM's CPU kernels for attention accept."""

import json
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load((Path(__file__).parents[1] / "data" / "engine_configs.yaml").read_text())
ENGINE_CONFIGS: dict[str, dict[str, Any]] = _TABLE["models"] | {
    f"{family}_vision": {
        **entries,
        "text_config": {key: value for key, value in _TABLE["models"][family].items() if key != "architectures"},
    }
    for family, entries in _TABLE["images"].items()
}
"""Families whose parameters in vLLM `engine_table` does not write out; loaders that run for real are their oracle."""


def write_engine_config(family: str, folder: Path) -> None:
    """Make a folder of a model without weights."""
    (folder / "config.json").write_text(json.dumps(ENGINE_CONFIGS[family]))
