"""FP8 through Transformer Engine: its settings in Megatron-Core's words, and a refusal where it cannot be had."""

from __future__ import annotations

from typing import Any

import torch

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Fp8Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.policy.modeling.layer_spec import uses_transformer_engine


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
