"""Settings of the model that the run's engines were started with, and that differ from those of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.schema import Config

ENGINES_FILE = "engines.json"
"""File of the run directory with the settings that each engine reported at its start."""
_NO_NUMBERS = frozenset({"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Entries of a model's configuration that change no number."""


def read_engine_settings(run_dir: Path, config: Config, model_config: Any) -> dict[str, Any]:
    """Entries of the model's configuration that engines have otherwise than the policy, by name.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        model_config: transformers' configuration of the policy's model.
    """
    overrides = config.generation.engine_args.get("hf_overrides")
    settings = dict(overrides) if isinstance(overrides, Mapping) else {}
    settings |= settings.pop("text_config", {})
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.pop(name, None)
        rope |= value if isinstance(value, Mapping) else {}
    if "rope_theta" in settings:
        rope["rope_theta"] = settings.pop("rope_theta")
    if rope:
        own = getattr(model_config, "rope_parameters", None) or {}
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", own.get("rope_type", "default")))
        settings["rope_parameters"] = {**own, **rope}
    return {
        name: value
        for name, value in settings.items()
        if name not in _NO_NUMBERS and hasattr(model_config, name) and getattr(model_config, name) != value
    }
