"""Base class of the schema's sections, and types of values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, dataclass_transform

from annotated_types import Predicate
from pydantic import AfterValidator, ConfigDict, Field

from megatron_grpo.config.paths import is_import_path

MISSING = "???"  # value of a required key, in OmegaConf's notation

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Steps = Annotated[int, Field(ge=-1), Predicate(lambda steps: steps != 0), "int > 0 or -1"]
# vLLM silently raises temperatures below 0.01, and training would divide by them as they are.
Temperature = Annotated[
    float,
    Field(ge=0, le=2),
    Predicate(lambda value: value == 0 or value >= 0.01),
    "0 (greedy) or float >= 0.01 and <= 2",
]
NonEmptyText = Annotated[str, Field(min_length=1), "text that is not empty"]
Seconds = Annotated[float, Field(gt=0)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
# Path of a file or folder; a leading ~ is the home folder, also where no shell replaces it.
PathText = Annotated[str, AfterValidator(os.path.expanduser), "text"]


@dataclass(frozen=True, slots=True)
class Starts:
    """Mark of a type whose values start programs, code or connections."""

    effect: str
    """What a value does, after "it"."""
    is_harmless: Callable[[Any], bool] = lambda value: False


def _is_plain(value: Any) -> bool:
    """True for numbers and plain words, which name neither code nor an address."""
    if isinstance(value, dict):  # such as kv_transfer_config, whose kv_connector_module_path may be a plain word
        return not any(isinstance(setting, dict | list | str) for setting in value.values())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not isinstance(value, str) or value.replace("-", "_").isidentifier()


IMPORTS, CONNECTS = "imports code", "connects to a server"
SENDS_SECRET = "sends the content of an environment variable to a server"

LOOSENS = "lets programs of the model reach more of this machine"

# File with a program in Jinja.
TemplateFile = Annotated[PathText, Starts("runs a chat template")]
# Code by its name in Python, such as package.module.function; names without a dot are built in.
ImportPath = Annotated[str, Starts(IMPORTS, lambda path: "." not in path)]
# A family of models: a Family in the user's code.
FamilyPath = Annotated[str, Predicate(is_import_path), "module:NAME", Starts(IMPORTS)]
# Server that gets data of the run, and its tokens.
Address = Annotated[str, Starts(CONNECTS)]
# Environment variable whose content a server gets.
SecretVariable = Annotated[str, Starts(SENDS_SECRET)]
# Pass-through fields, each with the library or class whose installed version checks them.
MegatronFields = Annotated[dict[str, Any], "Megatron-Core", Starts("may import code", _is_plain)]
VllmArguments = Annotated[dict[str, Any], "vLLM", Starts("may import code", _is_plain)]
EnvironmentOptions = Annotated[dict[str, Any], "the environment"]
TemplateArguments = Annotated[dict[str, Any], "the chat template"]
# Parameters of a named formula of the loss.
FormulaOptions = Annotated[dict[str, Any], "the function", Starts("is given to a function", _is_plain)]
GymOptions = Annotated[dict[str, Any], "reasoning_gym"]


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class Section:
    """A section of keys, a dataclass in every subclass; unknown keys are errors."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(kw_only=True)(cls)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of every leaf of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
