"""What an operator asks of a run besides its steps: checkpoints, start-up, memory of the hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.estimates import (
    count_checkpoint_bytes,
    count_host_bytes,
    count_loaded_bytes,
    count_store_bytes,
)
from megatron_grpo.platform.hardware import Hardware

GIB = 2**30
PROCESS_GIB = 8.0
"""Assumed host memory of a process that uses a GPU: code of CUDA and torch, and pinned buffers of NCCL."""
RAY_SHARE = 0.95
"""Share of a host's memory above which Ray ends processes (RAY_memory_usage_threshold)."""
PROCESSES_S = 90.0
"""Assumed seconds until processes have imported their packages, and engines have compiled and captured theirs."""
_MOST_SHARE = 0.05
"""Share of a run's time that saves may take before the plan suggests another period."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The checkpoints of a run."""

    bytes: int
    """Of one checkpoint."""
    write_s: float
    """Seconds until it is written."""
    wait_s: float
    """Seconds of them in which no step is made."""
    period_s: float
    """Seconds of the steps between two checkpoints."""
    stored: int | None
    """Checkpoints on the disk at once, with the newest and the one that is being written; None: all of the run."""
    stop_s: float
    """Seconds until a run that is told to stop has made its step and saved."""

    @property
    def share(self) -> float:
        """Share of a run's time in which it waits for saves."""
        return self.wait_s / (self.period_s + self.wait_s)

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON."""
        figures = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {**figures, "share": round(self.share, 4)}


def plan_checkpoints(config: Config, shape: ModelShape, hardware: Hardware, step_s: float) -> CheckpointPlan | None:
    """Plan the checkpoints of a run whose steps take `step_s`; None: it writes none."""
    if not config.has_checkpoints or config.plan.workload != "rl":
        return None
    settings, nbytes = config.checkpointing, count_checkpoint_bytes(config, shape)
    write_s, period_s = nbytes / (config.plan.storage_gb_per_s * 1e9), settings.save_period * step_s
    wait_s = write_s
    if settings.async_save:  # ranks copy their part to the host, and wait for the save before
        copy_s = nbytes / config.policy.parallel.world_size / hardware.host_bytes_per_s
        wait_s = copy_s + max(0.0, write_s - period_s)
    stored = None if settings.keep_top_k is None else settings.keep_top_k + 2
    stop_s = step_s + (2 if settings.async_save else 1) * write_s  # one may be on its way in the background
    return CheckpointPlan(nbytes, write_s, wait_s, period_s, stored, stop_s)


def describe_checkpoints(config: Config, plan: CheckpointPlan) -> Iterator[str]:
    """Describe checkpoints for a terminal, with advice where they take long."""
    settings, terabytes, speed = config.checkpointing, plan.bytes / 1e12, config.plan.storage_gb_per_s
    way = "in the background, " if settings.async_save else ""
    yield (
        f"checkpoints: {terabytes:.3g} TB each, written {way}in {plan.write_s:.0f} s at {speed:g} GB/s "
        f"(plan.storage_gb_per_s), every {settings.save_period} steps or {plan.period_s / 60:.0f} min; "
        f"saves take {plan.share:.1%} of the time"
    )
    if plan.stored is None:
        yield f"  all are kept: {terabytes:.3g} TB more every {settings.save_period} steps (checkpointing.keep_top_k)"
    else:
        sorts = f"keep_top_k={settings.keep_top_k}, the newest, and one that is being written"
        yield f"  at most {plan.stored} at once, {plan.stored * terabytes:.3g} TB: {sorts}"
    saves = "a save that is under way, and the last one" if settings.async_save else "and a save"
    yield f"  a run that is told to stop needs up to {plan.stop_s:.0f} s: a step, {saves}"
    if plan.share > _MOST_SHARE:
        steps = math.ceil(settings.save_period * plan.wait_s * (1 / _MOST_SHARE - 1) / plan.period_s)
        background = "" if settings.async_save else ", or checkpointing.async_save=true,"
        yield f"  checkpointing.save_period={steps}{background} would leave {1 - _MOST_SHARE:.0%} for steps"


def time_start(config: Config, shape: ModelShape, *, resumes: bool = False) -> float:
    """Compute the seconds from the start of the processes to the first step.

    `resumes`: from a checkpoint, whose bytes ranks read in place of the model's.
    """
    nbytes = count_checkpoint_bytes(config, shape) if resumes else count_loaded_bytes(config, shape)
    return PROCESSES_S + nbytes / (config.plan.storage_gb_per_s * 1e9)


def describe_start(config: Config, shape: ModelShape) -> str:
    """Describe a run's start for a terminal."""
    limit, start_s = config.cluster.startup_timeout_s, time_start(config, shape)
    resume = f", {time_start(config, shape, resumes=True):.0f} s from a checkpoint" if config.has_checkpoints else ""
    late = "; raise it" if start_s > limit else ""
    return f"start: about {start_s:.0f} s{resume}; cluster.startup_timeout_s={limit:g} is the limit{late}"


def list_host_parts(config: Config, shape: ModelShape) -> dict[str, float]:
    """List GiB on the host of one of the policy's nodes, by part."""
    nodes = math.ceil(config.policy.parallel.world_size / max(config.cluster.gpus, 1))
    shares_gpus = config.generation.is_colocated and config.needs_generation
    processes = config.cluster.gpus * (2 if shares_gpus else 1)
    return {
        "tensors": count_host_bytes(config, shape) / GIB / nodes,
        f"{processes} processes": processes * PROCESS_GIB,
        "Ray's store": count_store_bytes(config, shape) / GIB / nodes,
    }


def find_host_memory(config: Config, gpu: Hardware) -> float | None:
    """Find GiB of a node's host memory: plan.host_memory_gib, else the profile's."""
    return config.plan.host_memory_gib or gpu.host_memory_gib * config.cluster.gpus or None


def compare_host(config: Config, shape: ModelShape, gpu: Hardware) -> tuple[float, float | None]:
    """Compute GiB that a run needs on a node's host, and may have.

    Ray ends processes beyond the latter; None: the memory is unknown.
    """
    memory = find_host_memory(config, gpu)
    return sum(list_host_parts(config, shape).values()), None if memory is None else memory * RAY_SHARE
