"""Checks of how weights travel to the engines (refit) against what the engines keep and how the model is cut."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.fp8_matrices import cut_blocks
from megatron_grpo.models.places import engine_places, training_places
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.layout import layout_problems

_KEY = "refit.fp8_blocks=True"
_ENGINE = "fp8_per_block"


def refit_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """What keeps matrices from travelling in FP8; nothing when they do not.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
        shape: sizes of the policy's model; None: they are not known here.
    """
    if not config.refit.fp8_blocks:
        return
    if config.refit.mode != "reshard":
        yield Problem(_KEY, f"refit.mode={config.refit.mode} sends tensors as vLLM's loader reads them; use reshard")
    kept = config.generation.engine_args.get("quantization")
    if kept != _ENGINE:
        text = (
            f"is for engines that keep blocks in FP8; add +generation.engine_args.quantization={_ENGINE}, or use false"
        )
        yield Problem(_KEY, text)
    if (config.generation.engine.dtype or config.policy.precision) != "bfloat16":
        yield Problem(_KEY, "such engines compute in bfloat16; give generation.engine.dtype=bfloat16")
    if shape is not None and not any(layout_problems(config, shape)):
        places = training_places(config.policy.parallel, shape), engine_places(config.generation.parallel, shape)
        cuts = list(cut_blocks(shape, *places))
        if cuts:
            more = f" (and {len(cuts) - 1} more)" if len(cuts) > 1 else ""
            text = f"ranks would share a block of 128 x 128: {cuts[0]}{more}; use fewer tensor-parallel ranks, or false"
            yield Problem(_KEY, text)
