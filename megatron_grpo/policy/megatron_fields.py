"""Fields of Megatron-Core's classes beside those of model and layout: speed, memory, and what users pass on."""

from __future__ import annotations

import enum
import importlib.util
import os
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.platform.device import current_platform

T = TypeVar("T")


def transformer_fields(config: PolicyConfig) -> dict[str, Any]:
    """Fields of Megatron-Core's TransformerConfig that the settings of speed and memory make, and those passed on.

    Args:
        config: the model's configuration; with policy.deterministic, Transformer Engine is told too, through its
            environment variable.
    """
    fields: dict[str, Any] = {"gradient_accumulation_fusion": _fuses_accumulation(config)}
    if config.deterministic:
        # Read by Transformer Engine, which refuses deterministic_mode without it.
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        # On a CPU results repeat anyway, and the flag would only choose a slower embedding.
        fields["deterministic_mode"] = current_platform().name == "cuda"
    if config.recompute_modules:
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(config.recompute_modules)}
    return fields | config.megatron


def made(kind: type[T], ours: Mapping[str, Any], passed: Mapping[str, Any]) -> T:
    """One of Megatron-Core's configuration objects.

    Args:
        kind: class of the configuration object.
        ours: fields that the run sets.
        passed: fields that users set, their names and types checked; they count more. Types of tensors are given by
            name, as are members of enumerations.

    Raises:
        ValueError: Megatron-Core refuses what they make together.
    """
    hints = typing.get_type_hints(kind)
    try:
        return kind(**{**ours, **{name: _converted(hints[name], value) for name, value in passed.items()}})
    except (AssertionError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in passed.items())
        raise ValueError(f"Megatron-Core refuses {kind.__name__} with {given}: {error}") from error


def _converted(hint: Any, value: Any) -> Any:
    """A value of a configuration as a field of this type takes it."""
    if isinstance(value, str):
        for one in typing.get_args(hint) or (hint,):
            if one is torch.dtype:
                return getattr(torch, value)
            if isinstance(one, type) and issubclass(one, enum.Enum):
                return one[value]
    if isinstance(value, list) and any(typing.get_origin(one) is tuple for one in (hint, *typing.get_args(hint))):
        return tuple(value)
    return value


def _fuses_accumulation(config: PolicyConfig) -> bool:
    """Whether a matrix's gradient is added to its sum where it is made, which apex's extension can on a GPU."""
    if config.gradient_accumulation_fusion is not None:
        return config.gradient_accumulation_fusion
    if config.quantization is not None:
        return False  # the product is with a rounded weight, which has no gradient buffer
    extension = importlib.util.find_spec("fused_weight_gradient_mlp_cuda")
    return current_platform().name == "cuda" and extension is not None
