"""Fields of Megatron-Core's classes beside those of model and layout: speed, memory, and what users pass on."""

from __future__ import annotations

import enum
import importlib.util
import os
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from megatron_grpo.config.checks.passthrough import library_problems
from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Fp8Config, PolicyConfig
from megatron_grpo.platform.device import current_platform
from megatron_grpo.trainer.model.layer_spec import uses_transformer_engine
from megatron_grpo.weights.shape import ModelShape

T = TypeVar("T")


def passed_field_problems(sections: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Fields that users pass on and the installed Megatron-Core does not have, or has with another type.

    Args:
        sections: the fields by section of the configuration: policy.megatron, policy.ddp, policy.megatron_optimizer.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds: dict[str, type] = {
        "policy.megatron": TransformerConfig,
        "policy.ddp": DistributedDataParallelConfig,
        "policy.megatron_optimizer": OptimizerConfig,
    }
    problems: list[Problem] = []
    for section, values in sections.items():
        kind = kinds[section]
        what = f"field of Megatron-Core's {kind.__name__}"
        problems += library_problems(section, values, typing.get_type_hints(kind), what)
    return problems


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


def fp8_settings(fp8: Fp8Config) -> dict[str, Any]:
    """What Megatron-Core's TransformerConfig is given for FP8; nothing when it is off or simulated.

    Args:
        fp8: the configuration's section.
    """
    if not fp8.on_device:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.parameters,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": fp8.amax_algorithm,
        "first_last_layers_bf16": bool(fp8.first_layers_bf16 or fp8.last_layers_bf16),
        "num_layers_at_start_in_bf16": fp8.first_layers_bf16,
        "num_layers_at_end_in_bf16": fp8.last_layers_bf16,
    }


def require_fp8(fp8: Fp8Config, shape: ModelShape) -> None:
    """Refuse FP8 on a rank that cannot compute in it; does nothing when it is off or simulated.

    Raises:
        RunError: there is no GPU or no Transformer Engine, or the GPU is too old for the recipe.
    """
    if not fp8.on_device:
        return
    what = f"policy.fp8.format={fp8.format}"
    if not uses_transformer_engine(shape):
        raise RunError(f"{what} needs a GPU and Transformer Engine; policy.fp8.simulate=true has its numerics without")
    have = torch.cuda.get_device_capability()
    if have < fp8.least_capability:
        least, there = (".".join(map(str, capability)) for capability in (fp8.least_capability, have))
        name = torch.cuda.get_device_name()
        raise RunError(f"{what}, recipe={fp8.recipe}: needs compute capability {least}, and {name} has {there}")
