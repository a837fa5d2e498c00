"""Checks of adapters (policy.lora) against the model, and against what else the run does."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape


def adapter_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """What keeps a run from training adapters; nothing without them.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
        shape: sizes of the policy's model; None: they are not known here.
    """
    lora = config.policy.lora
    if not lora.rank:
        return
    targets = f"policy.lora.target_modules=[{','.join(lora.target_modules)}]"
    if not lora.target_modules:
        yield Problem(targets, "leaves nothing to train; name a layer, or set policy.lora.rank=0")
    if len(set(lora.target_modules)) < len(lora.target_modules):
        yield Problem(targets, "names a layer twice; name each once")
    if config.loop.sync_ref_model:
        yield Problem(
            f"{config.algorithm}.sync_ref_model=True",
            f"with policy.lora.rank={lora.rank} the reference policy is the base model itself, which does not move; "
            "use false, or train all weights with policy.lora.rank=0",
        )
    if config.policy.moe.bias_update_rate:
        rate = config.policy.moe.bias_update_rate
        yield Problem(f"policy.moe.bias_update_rate={rate:g}", "adapters leave the base model as it is; use 0")
    if shape is None:
        return
    if shape.latent is not None and "linear_qkv" in lora.target_modules:
        others = ",".join(name for name in lora.target_modules if name != "linear_qkv") or "linear_proj"
        text = f"latent attention has no linear_qkv; use [{others}]"
        yield Problem(targets, text)
    if shape.experts is not None and {"linear_fc1", "linear_fc2"} & {*lora.target_modules}:
        text = "the matrices of experts take no adapters; use [linear_qkv,linear_proj] and leave them as they are"
        yield Problem(targets, text)
