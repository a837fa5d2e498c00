"""Settings of the model with which the run's engines computed, and which differ from those of the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.run.directory import ENGINES_FILE

_NO_NUMBERS = frozenset({"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Entries of a model's configuration that change no number."""
_MODES = ("logprobs_mode", "dtype", "quantization", "kv_cache_dtype")
"""Other settings that the file of the engines has."""


def read_engine_settings(run_dir: Path, config: Config, model_config: Any) -> dict[str, Any]:
    """Read model settings that engines have otherwise than the policy.

    They are those that the engines reported at their start and, where they reported none, those of hf_overrides.

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
    """The settings that each engine reported; empty if the run recorded none.

    Raises:
        ValueError: the file is damaged; the text names it.
    """
    file = run_dir / ENGINES_FILE
    if not file.exists():
        return []
    try:
        engines = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(engines, list) or not all(isinstance(engine, dict) for engine in engines):
        raise ValueError(f"{file} is damaged: it has no list of engines")
    return engines


def list_differing_modes(run_dir: Path, config: Config) -> list[str]:
    """Describe engine settings that are not those of the configuration.

    Settings of the model are left out.
    """
    configured = {"logprobs_mode": "processed_logprobs", "dtype": config.engine_dtype}
    arguments = config.generation.engine_args
    configured |= {name: str(arguments[name]) for name in _MODES if name in arguments}
    texts = []
    for engine in read_engines(run_dir):
        for name, value in configured.items():
            reported = str(engine.get(name, value)).removeprefix("torch.")
            if reported != value:
                texts.append(f"engines reported {name}={reported}, and the configuration says {value}")
    return list(dict.fromkeys(texts))


def _rename_settings(settings: dict[str, Any], model_config: Any) -> dict[str, Any]:
    """Settings with the rotary embedding in one entry, as transformers has it."""
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


def _is_same(value: Any, second: Any) -> bool:
    """True if two values say the same, read from JSON or not.

    Of mappings only the keys of both are compared.
    """
    if isinstance(value, Mapping) and isinstance(second, Mapping):
        return all(_is_same(value[name], second[name]) for name in value.keys() & second.keys())
    if isinstance(value, list | tuple) and isinstance(second, list | tuple):
        return list(value) == list(second)
    return bool(value == second)
