"""Layouts of a whole run, models and engines together, on its nodes and on more of them, for advice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.changes import Changes, apply_changes, merge_changes
from megatron_grpo.planning.device_memory import GIB
from megatron_grpo.planning.engine_layouts import find_best_engines
from megatron_grpo.planning.estimates import count_static_bytes, estimate_activation_bytes
from megatron_grpo.planning.policy_layouts import (
    ENGINE_SIZES,
    POLICY_SIZES,
    find_least_static_gib,
    has_own_engines,
    iterate_possible_layouts,
    split_gpus,
)
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.planning.whole import Plan
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.config_checks import find_problems

_SPLITS = 24
"""Most ways to share GPUs out between policy and engines that are tried on a number of nodes."""
_LAYOUTS = 3
"""Layouts that are proposed of each way: those with the least estimated memory."""
_MOST_NODES = 512
_KEYS = (
    "cluster.num_nodes",
    "generation.placement",
    "reference.offload",
    "checkpointing.async_save",
    "policy.activation_checkpointing",
    "policy.recompute_modules",
    "policy.microbatch_tokens",
    "policy.logprob_microbatch_tokens",
    "policy.logprob_chunk_size",
    "policy.logprob_kernel",
    "policy.optimizer.distributed",
    "policy.optimizer.cpu_offload",
    "value.microbatch_tokens",
    "value.optimizer.distributed",
    "value.optimizer.cpu_offload",
)


def iterate_node_counts(config: Config, shape: ModelShape, gpu: Hardware, deadline: float) -> Iterator[int]:
    """Yield numbers of nodes on which a run may fit, ascending.

    Args:
        config: the run, with every key that saves memory.
        shape: sizes of the model.
        gpu: the GPUs.
        deadline: of time.monotonic.
    """
    nodes = config.cluster.num_nodes
    while nodes <= _MOST_NODES and time.monotonic() < deadline:
        if next(_iterate_fitting(_place_on_nodes(config, nodes), shape, gpu), None) is not None:
            yield nodes
        nodes += max(1, nodes // 4)


def _place_on_nodes(config: Config, nodes: int) -> Config:
    return replace(config, cluster=replace(config.cluster, num_nodes=nodes))


def iterate_run_layouts(
    before: Config, config: Config, shape: ModelShape, gpu: Hardware, nodes: int
) -> Iterator[Changes]:
    """Yield changes that turn `before` into layouts that may fit."""
    for layout in _iterate_fitting(_place_on_nodes(config, nodes), shape, gpu):
        changes = {
            key: _read_key(layout, key)
            for key in _list_keys(layout)
            if _read_key(layout, key) != _read_key(before, key)
        }
        if not find_problems(apply_changes(before, changes), shape):
            yield changes


def _list_keys(config: Config) -> Iterator[str]:
    yield from _KEYS
    yield from (f"policy.parallel.{name}" for name in POLICY_SIZES)
    if has_own_engines(config):
        yield from (f"generation.parallel.{name}" for name in ENGINE_SIZES)


def _read_key(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _iterate_fitting(config: Config, shape: ModelShape, gpu: Hardware) -> Iterator[Config]:
    """Yield layouts of policy and engines whose estimated memory fits."""
    # Layouts of the policy depend on the number of its GPUs alone. Of the splits that give it this number, the first
    # with engines that fit is enough.
    sized: dict[int, list[Config]] = {}
    used: set[int] = set()
    for policy_gpus, engine_gpus in split_gpus(config)[:_SPLITS]:
        if policy_gpus not in sized:
            sized[policy_gpus] = _list_fitting_policies(config, shape, gpu, policy_gpus)
        if policy_gpus in used or not sized[policy_gpus]:
            continue
        engines: Config | None = config
        if engine_gpus:
            engines = find_best_engines(config, shape, gpu, policy_gpus, engine_gpus, Refusals())
        if engines is None:
            continue
        used.add(policy_gpus)
        run_layouts = (replace(engines, policy=layout.policy) for layout in sized[policy_gpus])
        yield from islice((run_layout for run_layout in run_layouts if not find_problems(run_layout, shape)), _LAYOUTS)


def _list_fitting_policies(config: Config, shape: ModelShape, gpu: Hardware, gpus: int) -> list[Config]:
    """List layouts of the policy that may fit, by estimated memory."""
    usable = (gpu.memory_gib - gpu.reserve_gib) / (1 + gpu.fragmentation)
    sized: list[tuple[float, int, Config]] = []
    for layout in iterate_possible_layouts(config, shape, gpus, Refusals()):
        if layout.policy.activation_checkpointing != config.policy.activation_checkpointing:
            continue
        static = count_static_bytes(layout, shape) / GIB
        estimated = static + estimate_activation_bytes(layout, shape) / GIB if static < usable else static
        if estimated < usable:
            sized.append((estimated, len(sized), layout))
    return [layout for _, _, layout in sorted(sized, key=lambda row: row[:2])]


def find_least_gib(plan: Plan) -> float:
    """Find the least static GiB of a GPU with every memory-saving key."""
    # Engines of one GPU leave the policy most of the GPUs, so these splits come first.
    config = apply_changes(plan.config, merge_changes(plan))
    counts = sorted({policy for policy, _ in split_gpus(config)}, reverse=True)[:_SPLITS]
    return min((find_least_static_gib(config, plan.shape, gpus) for gpus in counts), default=float("inf"))
