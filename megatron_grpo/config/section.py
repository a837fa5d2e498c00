"""Base class of the schema's sections, and types of values."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, ClassVar, dataclass_transform

from annotated_types import Predicate
from pydantic import AfterValidator, ConfigDict, Field

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
# Pass-through fields, each with the library or class whose installed version checks them.
MegatronFields = Annotated[dict[str, Any], "Megatron-Core"]
VllmArguments = Annotated[dict[str, Any], "vLLM"]
EnvironmentOptions = Annotated[dict[str, Any], "the environment"]
TemplateArguments = Annotated[dict[str, Any], "the chat template"]
GymOptions = Annotated[dict[str, Any], "reasoning_gym"]


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class Section:
    """A section of keys, a dataclass in every subclass; unknown keys are errors."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(kw_only=True)(cls)
