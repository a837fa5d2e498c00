"""Keys of the schema whose values are, or hold, texts."""

import json
import re
from dataclasses import asdict
from typing import Any

from megatron_grpo.config.keys import FREE_TYPE, read_keys
from megatron_grpo.config.schema import Config
from megatron_grpo.run.directory import override_values

# Of launch.*: names, paths and options in a form that a shell and YAML read as they are.
_FORMS = "a word without.*|an image without.*|--NAME.*|NAME=.*|/FROM.*|an absolute path.*|small letters.*|"
_OF_LORA = "peft's names,?|all-linear"
_FORMS += "the name of an object|http://HOST:PORT"


def can_hold_text(key: str) -> bool:
    kinds = read_keys()[key].type.removeprefix("list of ").split(" or ")
    if names_code(key):
        return True
    plain = re.compile(rf"{_FORMS}|int\b.*|float\b.*|null|true|false|one of .*|0 \(greedy\)|-1|{_OF_LORA}")
    return read_keys()[key].type == FREE_TYPE or not all(map(plain.fullmatch, kinds))


def names_code(key: str) -> bool:
    """True if a key takes an import path beside names that are built in."""
    return "module" in read_keys()[key].type


def fit_text(kind: str, text: str) -> Any:
    """A value with a text for a key of a type."""
    if kind == "reasoning_gym":
        return {"x": text}
    return [text] if kind.startswith("list") else text


def name_key(key: str) -> str:
    """The name of a key where the user chooses parts of it."""
    return key.replace("<name>", "x").replace("<field>", "y")


def set_key(key: str, value: Any) -> Config:
    """The default configuration with one more value."""
    if key == "algorithm":  # which no command exchanges in a recorded configuration
        return Config(algorithm=value)
    return override_values(asdict(Config()), [f"{name_key(key)}={json.dumps(value)}"], "file", is_trusted=True)
