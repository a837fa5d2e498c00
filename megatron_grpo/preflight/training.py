"""Checks of the settings of speed and memory that models are trained with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config, OptimizerConfig
from megatron_grpo.models.shape import ModelShape

_OF_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "mla_up_proj")
"""Modules whose output is dropped too, for which Megatron-Core calls functions of Transformer Engine."""
_OF_EXPERTS = ("moe", "moe_act", "shared_experts")


def training_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings of speed and memory that exclude each other, or that model or devices do not have a use for.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
        shape: sizes of the policy's model; None: not known here.
    """
    yield from _recomputation(config, shape)
    yield from _overlap(config)
    if config.policy.gradient_accumulation_fusion and config.cluster.gpus == 0:
        yield Problem("policy.gradient_accumulation_fusion=True", "needs GPUs; use null, which is true where it can be")
    yield from _optimizer(config, "policy", config.policy.optimizer)
    if config.loop.has_value_model:
        yield from _optimizer(config, "value", config.value.optimizer)


def _recomputation(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    modules = config.policy.recompute_modules
    if not modules:
        return
    key = f"policy.recompute_modules=[{','.join(modules)}]"
    if config.policy.activation_checkpointing:
        yield Problem(key, "policy.activation_checkpointing=true recomputes whole layers; choose one of them")
    if len(set(modules)) < len(modules):
        yield Problem(key, "names a module twice")
    engine = [module for module in modules if module in _OF_TRANSFORMER_ENGINE]
    if engine and config.cluster.gpus == 0:
        yield Problem(
            key, f"{', '.join(engine)} can be recomputed only by Transformer Engine, which needs GPUs; leave out"
        )
    if shape is None:
        return
    lacking = [module for module in modules if module in _OF_EXPERTS and shape.experts is None]
    if lacking:
        yield Problem(key, f"the model has no experts; leave out {', '.join(lacking)}")
    if "mla_up_proj" in modules and shape.latent is None:
        yield Problem(key, "the model has no latent attention; leave out mla_up_proj")


def _overlap(config: Config) -> Iterator[Problem]:
    policy = config.policy
    if not policy.overlap_param_gather:
        return
    reduces = config.cluster.gpus > 0 if policy.overlap_grad_reduce is None else policy.overlap_grad_reduce
    if not reduces:
        yield Problem("policy.overlap_param_gather=True", "needs policy.overlap_grad_reduce=true")
    trained = [
        ("policy", policy.optimizer),
        *([("value", config.value.optimizer)] if config.loop.has_value_model else []),
    ]
    for section, optimizer in trained:
        if not optimizer.distributed:
            yield Problem("policy.overlap_param_gather=True", f"needs {section}.optimizer.distributed=true")


def _optimizer(config: Config, section: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    asked = {
        f"{section}.optimizer.cpu_offload={optimizer.cpu_offload:g}": optimizer.cpu_offload > 0,
        f"{section}.optimizer.precision_aware=True": optimizer.precision_aware,
    }
    for key, wanted in asked.items():
        if wanted and config.cluster.gpus == 0:
            text = "without GPUs everything is in host memory already" if "offload" in key else "needs GPUs"
            yield Problem(key, f"{text}; leave it out, or give cluster.gpus")
        elif wanted and not optimizer.distributed:
            yield Problem(key, f"needs {section}.optimizer.distributed=true")
