"""Checks of quantisation-aware training (policy.quantization) against the model, the rest of the run, the machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape


def quantization_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """What keeps the policy from quantisation-aware training, wherever it runs; nothing when it is off.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
        shape: sizes of the policy's model; None: they are not known here.
    """
    policy = config.policy
    if policy.quantization is None:
        return
    subject = f"policy.quantization={policy.quantization}"
    if policy.fp8.format != "off":
        yield Problem(subject, "rounds the same products as policy.fp8; use null, or policy.fp8.format=off")
    if policy.lora.rank:
        text = "rounds weights that are trained, and adapters leave them as they are; use null, or policy.lora.rank=0"
        yield Problem(subject, text)
    if policy.gradient_accumulation_fusion:
        text = "takes the gradient of the weight itself, and the product is with a rounded one; use null"
        yield Problem("policy.gradient_accumulation_fusion=True", f"with {subject}: {text}")
    if shape is not None and shape.experts is not None:
        yield Problem(subject, "is not supported for a mixture of experts; use null")
    elif shape is not None and shape.latent is not None:
        yield Problem(subject, "is not supported with latent attention; use null")


def quantization_machine_problems(config: Config) -> Iterator[Problem]:
    """What this machine lacks for quantisation-aware training; nothing when it is off."""
    quantization = config.policy.quantization
    if quantization is None or config.cluster.ray_address is not None:
        return
    if importlib.util.find_spec("modelopt") is None:
        text = "needs a package that is not installed here: pip install nvidia-modelopt, or use null"
        yield Problem(f"policy.quantization={quantization}", text)
