"""Changes of keys that may make a run fit: single keys, layouts of its models, layouts of its engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.engine_layouts import find_room_problems, is_of_engines, iterate_engine_layouts
from megatron_grpo.planning.policy_layouts import (
    ENGINE_SIZES,
    POLICY_SIZES,
    count_idle_gpus,
    iterate_legal_layouts,
    write_value,
)
from megatron_grpo.planning.whole import Plan
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.refit_memory import find_largest_share, list_refit_parts

_USUAL_SHARE = 0.9  # vLLM's default of gpu_memory_utilization
Changes = dict[str, Any]
"""New values by key, such as policy.microbatch_tokens."""


def apply_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Copy a configuration, with other values of some keys."""
    copied = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        node: Any = copied
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, value)
    return copied


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Write changes as on a command line."""
    return [f"{key}={write_value(value)}" for key, value in changes.items()]


def iterate_single_changes(plan: Plan) -> Iterator[Changes]:
    """Yield keys that save memory; results only round differently."""
    config = plan.config
    yield from _iterate_model_changes(config, "policy")
    if config.value_model is not None:
        yield from _iterate_model_changes(config, "value")
    if config.uses_reference and not config.reference.offload and not config.policy.lora.rank:
        yield {"reference.offload": True}
    needed, available = plan.host
    if available is None or needed <= available:
        return
    if config.has_checkpoints and config.checkpointing.async_save:
        yield {"checkpointing.async_save": False}
    if config.uses_reference and config.reference.offload:
        yield {"reference.offload": False}
    share = config.policy.optimizer.cpu_offload
    yield from ({"policy.optimizer.cpu_offload": less} for less in (0.75, 0.5, 0.25, 0.0) if less < share)


def _iterate_model_changes(config: Config, section: str) -> Iterator[Changes]:
    """Yield keys of a model's batches, kernels and optimizer."""
    model, longest = getattr(config, section), config.policy.max_total_sequence_length
    is_policy = section == "policy"
    tokens = model.microbatch_tokens or config.policy.microbatch_tokens
    if tokens > longest:
        yield {f"{section}.microbatch_tokens": longest}
    if is_policy:
        if not model.activation_checkpointing:
            reset: Changes = {"policy.recompute_modules": []} if model.recompute_modules else {}
            yield {"policy.activation_checkpointing": True, **reset}
        if (model.logprob_microbatch_tokens or 0) > longest:
            yield {"policy.logprob_microbatch_tokens": longest}
        if model.logprob_chunk_size is not None:
            yield {"policy.logprob_chunk_size": None}
        if model.logprob_kernel == "chunked":
            yield {"policy.logprob_kernel": "fused"}
    if model.parallel.tensor > 1 and not model.parallel.sequence:
        yield {f"{section}.parallel.sequence": True}
    distributed: Changes = {} if model.optimizer.distributed else {f"{section}.optimizer.distributed": True}
    if distributed:
        yield distributed
    if model.optimizer.cpu_offload < 1:
        yield {f"{section}.optimizer.cpu_offload": 1.0, **distributed}


def merge_changes(plan: Plan) -> Changes:
    """Merge all single changes; a key keeps its first value."""
    merged: Changes = {}
    for change in iterate_single_changes(plan):
        merged |= {key: value for key, value in change.items() if key not in merged}
    return merged


def iterate_layout_changes(plan: Plan, section: str, shape: ModelShape) -> Iterator[Changes]:
    """Yield other layouts of a model, on its and idle GPUs.

    Args:
        plan: the plan of the run.
        section: policy or value.
        shape: sizes of the section's model.
    """
    config = plan.config
    model = config.policy if section == "policy" else config.value_model
    assert model is not None
    gpus_of_model, spare = model.parallel.world_size, 0 if config.generation.is_colocated else count_idle_gpus(config)
    # Layouts are checked as if the model were the policy; engines and other models are checked later, with the run.
    alone = replace(config, policy=model)
    for gpus in dict.fromkeys(
        [
            gpus_of_model,
            *(gpus_of_model * factor for factor in range(2, 9) if gpus_of_model * factor <= gpus_of_model + spare),
            gpus_of_model + spare,
        ]
    ):
        for layout in iterate_legal_layouts(alone, shape, gpus, needs_all=False):
            if layout.policy.activation_checkpointing == model.activation_checkpointing:
                changes = _list_differences(section, model.parallel, layout.policy.parallel)
                if changes:
                    yield changes


def _list_differences(section: str, before: ParallelConfig, after: ParallelConfig) -> Changes:
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in POLICY_SIZES)
    return {f"{section}.parallel.{name}": new for name, old, new in pairs if new != old}


def find_engine_changes(plan: Plan) -> Changes | None:
    """Find the fewest keys that give engines room; None: none do."""
    # An engine takes more of its GPUs' memory, or splits its weights over more GPUs, idle ones too.
    config, shape, gpu = plan.config, plan.shape, plan.hardware
    if plan.engine is None:
        return {}
    parallel = config.generation.parallel
    gpus_of_engines = parallel.ranks_per_engine * parallel.data
    counts = (
        [gpus_of_engines]
        if config.generation.is_colocated
        else [gpus_of_engines, *range(gpus_of_engines + 1, gpus_of_engines + count_idle_gpus(config) + 1)]
    )
    best: tuple[tuple[int, float], Changes] | None = None
    for gpus in counts:
        for layout in (parallel, *iterate_engine_layouts(config, shape, gpus)):
            for share in _list_memory_shares(plan):
                changes = _list_engine_differences(config, layout, share)
                candidate = apply_changes(config, changes)
                order = (len(changes), abs(share - config.generation.engine.gpu_memory_utilization))
                if best is not None and order >= best[0]:
                    continue
                problems = [problem for problem in find_problems(candidate, shape) if is_of_engines(problem)]
                if not problems and not find_room_problems(candidate, shape, gpu):
                    best = order, changes
    return None if best is None else best[1]


def _list_memory_shares(plan: Plan) -> list[float]:
    # gpu_memory_utilization of the run, vLLM's default, and the largest that leaves room to a refit and to the models.
    share, available = plan.config.generation.engine.gpu_memory_utilization, plan.hardware.memory_gib * 2**30
    is_colocated = plan.config.generation.is_colocated
    refit = sum(list_refit_parts(plan.config, plan.shape, plan.hardware).values())
    largest = find_largest_share(plan.beside_engine if is_colocated else refit, available)
    if largest < share:
        return [largest]
    if is_colocated:
        return [share, largest]
    return [share, *(larger for larger in (_USUAL_SHARE, largest) if share < larger <= largest)]


def _list_engine_differences(config: Config, layout: Any, share: float) -> Changes:
    parallel = config.generation.parallel
    pairs = ((name, getattr(parallel, name), getattr(layout, name)) for name in ENGINE_SIZES)
    changes: Changes = {f"generation.parallel.{name}": new for name, old, new in pairs if new != old}
    if share != config.generation.engine.gpu_memory_utilization:
        changes["generation.engine.gpu_memory_utilization"] = share
    return changes
