"""Settings in which a run's engines differ from its policy and from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.outside_files import read_json
from megatron_grpo.config.schema import Config
from megatron_grpo.run.directory import ENGINES_FILE

_NO_NUMBERS = frozenset({"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Entries of a model's configuration that change no number."""
_MODES = ("logprobs_mode", "dtype", "quantization", "kv_cache_dtype")
"""Settings of an engine, besides those of its model, that ENGINES_FILE records."""


def read_engine_settings(run_dir: Path, config: Config, model_config: Any) -> dict[str, Any]:
    """Read model settings in which the engines differ from the policy.

    The engines reported them at their start; what they did not report is that of hf_overrides.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        model_config: transformers' configuration of the policy's model.

    Raises:
        ValueError: the file of the engines is damaged; the text names it.
    """
    overrides = config.generation.engine_args.get("hf_overrides")
    settings = _rename_settings(dict(overrides) if isinstance(overrides, Mapping) else {}, model_config)
    for engine in read_engines(run_dir):
        settings |= engine.get("model", {})
    policy = model_config.to_dict()
    return {
        name: value
        for name, value in settings.items()
        if name in policy and name not in _NO_NUMBERS and name[0] != "_" and not _is_same(policy[name], value)
    }


def read_engines(run_dir: Path) -> list[dict[str, Any]]:
    """Read the settings that each engine reported; empty if none are recorded."""
    file = run_dir / ENGINES_FILE
    if not file.exists():
        return []
    engines = read_json(file)
    if not isinstance(engines, list) or not all(isinstance(engine, dict) for engine in engines):
        raise ValueError(f"{file} is damaged: it has no list of engines")
    return engines


def list_differing_modes(run_dir: Path, config: Config) -> list[str]:
    """Describe the modes and dtypes of engines that are not configured."""
    configured = {"logprobs_mode": "processed_logprobs", "dtype": config.engine_dtype}
    arguments = config.generation.engine_args
    configured |= {name: str(arguments[name]) for name in _MODES if name in arguments}
    texts = []
    for engine in read_engines(run_dir):
        # What an engine did not report counts as configured.
        for name, value in configured.items():
            reported = str(engine.get(name, value)).removeprefix("torch.")
            if reported != value:
                texts.append(f"engines reported {name}={reported}, and the configuration says {value}")
    return list(dict.fromkeys(texts))


def _rename_settings(settings: dict[str, Any], model_config: Any) -> dict[str, Any]:
    # The rotary embedding gets into one entry, as transformers has it.
    settings |= settings.pop("text_config", {})
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.pop(name, None)
        rope |= value if isinstance(value, Mapping) else {}
    if "rope_theta" in settings:
        rope["rope_theta"] = settings.pop("rope_theta")
    if rope:
        parameters = dict(getattr(model_config, "rope_parameters", None) or {})
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", parameters.get("rope_type", "default")))
        settings["rope_parameters"] = {**parameters, **rope}
    return settings


def _is_same(first: Any, second: Any) -> bool:
    """True if values are equal; of mappings only common keys count."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return all(_is_same(first[name], second[name]) for name in first.keys() & second.keys())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):  # JSON has no tuples
        return list(first) == list(second)
    return bool(first == second)
