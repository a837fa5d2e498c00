"""The configuration of an earlier run, with some of its keys changed on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.errors import ConfigError, Problem, to_text
from megatron_grpo.config.loop_schema import translate_key
from megatron_grpo.config.overrides import OPTION, SEARCH_KEY, list_config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.config.suggestions import describe_unknown_key
from megatron_grpo.run.directory import CONFIG_FILE, read_config_file


def is_composition(name: str) -> bool:
    """Tell whether an argument composes the configuration from files."""
    return name == OPTION or name.lstrip("+") in {SEARCH_KEY, *list_config_groups()}


def load_run_config(run_dir: Path, overrides: Sequence[str]) -> Config:
    """Load the configuration of a run's last start, with changes.

    Raises:
        ConfigError: an override (section.key=VALUE in YAML) is not understood, or makes the configuration wrong.
        ValueError: the folder has no configuration, or one that cannot be read.
    """
    file = run_dir / CONFIG_FILE
    try:
        values = read_config_file(file)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; a checkpoint has to stay in its run directory") from None
    return override_values(values, overrides, str(file))


def override_values(values: dict[str, Any], overrides: Sequence[str], source: str) -> Config:
    """Build the configuration of recorded values, which `overrides` change.

    `source`: origin of the values, for messages.

    Raises:
        ConfigError: a change is not understood, or makes the configuration wrong.
    """
    algorithm = str(values.get("algorithm", "grpo"))
    for override in overrides:
        if override.startswith("+") or is_composition(override.partition("=")[0]):
            text = "cannot be composed with the recorded configuration of a run; change single keys, section.key=VALUE"
            raise ConfigError([Problem(override, text)])
        _set_value(values, override, algorithm)
    config, problems = convert_values(values, algorithm)
    if problems or config is None:
        raise ConfigError(problems or [Problem(source, "is not the configuration of a run")])
    return config


def _set_value(values: dict[str, Any], override: str, algorithm: str) -> None:
    """Apply section.key=VALUE (in YAML); the algorithm has the shared loop keys."""
    name, _, text = override.partition("=")
    *sections, last = translate_key(algorithm, name).split(".")
    node: Any = values
    for section in sections:
        node = node.setdefault(section, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError([describe_unknown_key(name, algorithm)])
    try:
        node[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an impossible date
        advice = "not understood; lists are written [a,b], and other signs need quotes around the value"
        raise ConfigError([Problem(f"{name}={to_text(text)}", advice)]) from None
