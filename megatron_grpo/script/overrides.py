"""The command line that says what a script says: overrides in a mapping, reward functions, environments."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.script.names import check_name

GIVEN = "given"
"""Stands in the place of a module in the entries of functions that cannot be imported."""

Overrides = str | Sequence[str] | Mapping[str, Any]


def written(config: Any) -> list[str]:
    """Overrides as they stand on a command line; what is given for them may be anything.

    Raises:
        ConfigError: a value is nothing that a command line can hold, or there are no overrides in what was given.
    """
    if isinstance(config, str):
        return [config]
    if isinstance(config, Mapping):
        return [f"{key}={_value(value, str(key))}" for key, value in config.items()]
    if not isinstance(config, Sequence):
        text = f"is {type(config).__name__}; give a list of overrides, a mapping of keys and values, or a Config"
        raise ConfigError([Problem("config", text)])
    for number, one in enumerate(config):
        if not isinstance(one, str):
            text = f"is {type(one).__name__}; give the text of an override: 'grpo.max_num_steps=3'"
            raise ConfigError([Problem(f"config[{number}]", text)])
    return list(config)


def _value(value: Any, key: str) -> str:
    """A value in Hydra's syntax; `key` is where it stands."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_value(one, f'{key}.{name}')}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value(one, key) for one in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = f"is {type(value).__name__}; give a number, a text, a path, true or false, or a list or mapping of such"
    raise ConfigError([Problem(key, text)])


def reward_overrides(
    task: str, rewards: Sequence[str | Callable[..., Any]], functions: dict[str, Callable[..., Any]]
) -> list[str]:
    """The environment of reward functions; those that cannot be imported are added to `functions`."""
    if not rewards:
        return []
    entries = []
    for reward in rewards:
        if isinstance(reward, str):
            entries.append(reward)
            continue
        entry = _import_path(reward)
        if entry is None:
            entry = f"{GIVEN}.{_name(reward)}"
            if entry in functions:
                text = f"has two functions called {_name(reward)}; their rewards could not be told apart"
                raise ConfigError([Problem("rewards", text)])
            functions[entry] = reward
        entries.append(entry)
    quoted = ",".join(json.dumps(entry) for entry in entries)
    return [f"env.{task}.type=reward_functions", f"env.{task}.reward_funcs=[{quoted}]"]


def _import_path(function: Callable[..., Any]) -> str | None:
    """The path that leads to a function from anywhere; None: it is of a notebook or script, or inside another one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    found = getattr(inspect.getmodule(function), name, None)
    return f"{module}.{name}" if found is function else None


def _name(function: Callable[..., Any]) -> str:
    """What a function is called in metrics; of an object, what its class is."""
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W", "_", name) if name != "<lambda>" else "reward"


def environment_overrides(environments: Mapping[str, str | type]) -> list[str]:
    """The types of the environments by task name.

    Raises:
        ConfigError: a name cannot stand in a key.
    """
    found = []
    for task, kind in environments.items():
        check_name(task, "environments", "env")
        path = kind if isinstance(kind, str) else f"{kind.__module__}:{kind.__qualname__}"
        found.append(f"env.{task}.type={path}")
    return found
