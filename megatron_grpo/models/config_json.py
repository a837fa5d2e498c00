"""Reads single values of a model's config.json, which people edit and tools write in many ways."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import shown


def read_config_json(file: Path) -> dict[str, Any]:
    """The contents of a config.json.

    Raises:
        ValueError: there is none, it cannot be read, or it is no JSON object; names the file.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file} does not exist; give a folder in Hugging Face format") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # no JSON, thousands of digits or of brackets
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} is no object {{...}} but {type(raw).__name__}; give a folder in Hugging Face format")
    return raw


def size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of things, at least 1.

    Args:
        raw: contents of config.json, by key.
        key: name of the number in config.json.
        default: taken when the key is missing or null; None: the key has to be there.

    Raises:
        ValueError: the key is missing without a default, or is no whole number of at least 1.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={shown(value)} must be a whole number above 0")
    return value


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number above 0.

    Raises:
        ValueError: the value is there, and is something else.
    """
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={shown(value)} must be a number above 0")
    return float(value)


def section(raw: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The first object among keys of one meaning; empty when there is none.

    Raises:
        ValueError: the value is there, and is something else.
    """
    for key in keys:
        value = raw.get(key)
        if value:
            if not isinstance(value, dict):
                raise ValueError(f"{key}={shown(value)} must be an object {{...}}")
            return value
    return {}
