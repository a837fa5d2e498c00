"""The Ray actor around one rank of the policy or of the value model."""

from __future__ import annotations

import gc
import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.data.step_batch import StepBatch


ReplicaWork = tuple["StepBatch", list[list[int]]]
"""A replica's part of a batch (`StepBatch.of_shards`), and for each microbatch the numbers of its sequences in it."""


@dataclass(frozen=True, kw_only=True)
class RankSettings(ABC):
    """Everything that a rank of a model is built from."""

    config: PolicyConfig
    shape: ModelShape
    folder: str
    decay_steps: int
    seed: int
    shares_cores: bool = False
    """Whether engines work at the same time as the ranks, on a CPU on the same cores."""

    @abstractmethod
    def build_rank(self) -> Any:
        """Build a rank's model; called on the rank, where torch and Megatron-Core may be imported."""


@dataclass(frozen=True)
class RankPlace:
    """What a rank reports when it has started."""

    data: int
    device_name: str
    """Name that the vendor gives the rank's GPU; "cpu" without one."""
    startup_s: dict[str, float]
    """Seconds of the rank's start by part: "imports"; "model" (process groups, the model and its weights)."""


@dataclass(frozen=True)
class ForwardShare:
    """One replica's outputs at every token of its shards."""

    shards: list[Any]
    """For each shard, Ray's reference to [tokens of the shard], float32."""
    finite: Any
    """[sequences], bool: whether all numbers at sampled tokens are finite."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """The answer of one rank to an optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient; when it is not finite the optimizer step was not made."""
    learning_rate: float
    metrics: list[dict[str, float]] | None
    """Loss and metrics of each microbatch of the rank; None on ranks without the loss."""


class RankActor:
    """Ray actor: holds a rank's model, fetches what the rank works on, and runs functions on it."""

    def __init__(self, name: str, rank: int, world_size: int, threads: int) -> None:
        begin_process_log(name)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is first imported, in `start`
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when CUDA starts (`initialize_parallel`)
        self.rank, self.world_size, self.threads = rank, world_size, threads
        self._imports_s = 0.0

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the ranks' rendezvous store in this process; returns its address."""
        from megatron_grpo.cluster.ray_cluster import node_address
        from megatron_grpo.platform.device import open_store

        self.store = open_store(node_address(), timeout_s)
        return self.store.host, self.store.port

    def gpus(self) -> list[str]:
        """Ray's ids of this process's GPUs: one, or none on a CPU."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]

    @phase("import packages")
    def import_packages(self) -> None:
        """Import torch and Megatron-Core: most of the time that a rank takes to start on a small model."""
        began = time.monotonic()
        from megatron_grpo.platform.device import current_platform, require_gpus
        from megatron_grpo.platform.hooks import check_hooks

        require_gpus(self.gpus())
        if current_platform().name == "cpu":
            from megatron_grpo.cpu.megatron import apply_patches

            apply_patches()
        importlib.import_module("megatron_grpo.trainer.rank")
        check_hooks(current_platform().name)
        self._imports_s += time.monotonic() - began

    @phase("start")
    def start(self, settings: RankSettings, store_address: tuple[str, int]) -> RankPlace:
        """Join the group, build the model and load this rank's weights."""
        self.import_packages()
        began = time.monotonic()
        import torch
        from megatron.core import parallel_state

        from megatron_grpo.platform.device import current_platform, reach_store
        from megatron_grpo.trainer.parallel import initialize_parallel, make_deterministic

        if current_platform().name == "cpu":
            torch.set_num_threads(self.threads)
        elif settings.config.deterministic:
            make_deterministic()
        initialize_parallel(
            settings.config.parallel,
            rank=self.rank,
            world_size=self.world_size,
            store=reach_store(*store_address, settings.config.timeout_s),
            seed=settings.seed,
            timeout_s=settings.config.timeout_s,
        )
        self.model = settings.build_rank()
        gc.freeze()  # start-up objects live for ever; a full collection over them takes a third of a second
        return RankPlace(
            data=parallel_state.get_data_parallel_rank(),
            device_name=torch.cuda.get_device_name() if current_platform().name == "cuda" else "cpu",
            startup_s={"imports": self._imports_s, "model": time.monotonic() - began},
        )

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(this rank's model, *args)."""
        with phase(fn.__name__.strip("_")):
            return fn(self.model, *args)

    @phase("train")
    def train(self, work: ReplicaWork, loss_fn: Any, counts: Any) -> Any:
        """One optimizer step on the replica's work (`ModelRank.train`)."""
        batch, microbatches = work
        return self.model.train(self._fetch(batch, loss_fn), microbatches, loss_fn, counts)

    def forward(self, method: str, work: ReplicaWork) -> ForwardShare | None:
        """Put a number for every token of the replica's shards into the object store.

        Args:
            method: name of the method of the rank's model that gives the numbers of all sequences.
            work: the replica's part of the batch, and microbatches that hold all of its sequences.

        Returns:
            References to the numbers, on the output rank; None elsewhere.
        """
        import numpy as np
        import ray

        batch, microbatches = work
        with phase(method):
            tokens = self._fetch(batch, None)
            values = getattr(self.model, method)(tokens, microbatches)
        if values is None:
            return None
        of_sequences = values.isfinite().logical_or(tokens.fields.sampled.logical_not()).split(tokens.lengths)
        ends = np.cumsum([int(batch.lengths[shard].sum()) for shard in batch.shards])
        return ForwardShare(
            shards=[ray.put(part) for part in np.split(values.numpy(), ends[:-1])],
            finite=np.array([bool(piece.all()) for piece in of_sequences]),
        )

    def _fetch(self, batch: StepBatch, loss_fn: Any) -> Any:
        """Get the fields that this rank's stage reads from the object store; no others are moved to its node."""
        import ray

        from megatron_grpo.data.batch import TokenBatch

        wanted = [name for name in self.model.stored_entries(loss_fn) if name in batch.fields]
        with phase("fetch tokens"):  # waits for shards that are still in transfer
            arrays = iter(ray.get([reference for name in wanted for reference in batch.fields[name]]))
        return TokenBatch.of_replica(batch, {name: [next(arrays) for _ in batch.shards] for name in wanted})


def give_up_memory(rank: Any, weights: bool) -> None:
    """Release this rank's memory on the device (`DeviceMemory.give_up`); runs on every rank."""
    rank.memory.give_up(weights=weights)


def take_back_memory(rank: Any) -> None:
    """Restore this rank's memory on the device; runs on every rank."""
    rank.memory.take_back()


def save_checkpoint(rank: Any, folder: str, background: bool) -> None:
    """Write this rank's part of a checkpoint, or begin to in the background; runs on every rank."""
    from megatron_grpo.trainer.checkpoint import errors_in_one_line, save_rank

    with errors_in_one_line(f"{folder} cannot be written"):
        save_rank(rank, folder, background=background)


def checkpoint_is_written(rank: Any) -> bool:
    """Whether this rank's part of a checkpoint in the background is written, or given up."""
    return rank.writing is None or bool(rank.writing.is_over)


def finish_checkpoint(rank: Any) -> None:
    """Complete a checkpoint that was begun in the background; runs on every rank."""
    from megatron_grpo.trainer.checkpoint import errors_in_one_line

    writing, rank.writing = rank.writing, None
    with errors_in_one_line("a checkpoint cannot be written"):
        writing.finish()


def load_checkpoint(rank: Any, folder: str) -> None:
    """Load this rank's part of a checkpoint; runs on every rank."""
    from megatron_grpo.trainer.checkpoint import errors_in_one_line, load_rank

    with errors_in_one_line(f"{folder} cannot be loaded"):
        load_rank(rank, folder)


MEMORY_EVENTS = 200_000
"""Allocations that a memory snapshot remembers, the latest ones."""


_profiler: profile | None = None
"""The profile that this process is recording."""


def begin_profile(_: Any) -> None:
    """Start recording; runs on every rank."""
    global _profiler
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    _profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
    _profiler.start()


def end_profile(_: Any, folder: str, name: str) -> None:
    """Stop, and write NAME.json (a trace for chrome://tracing or Perfetto) and on a GPU NAME.memory.pickle.

    Args:
        folder: an existing folder.
        name: name of this rank's files.
    """
    global _profiler
    assert _profiler is not None, "a profile ends that did not begin"
    _profiler.stop()
    _profiler.export_chrome_trace(str(Path(folder) / f"{name}.json"))
    _profiler = None
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(Path(folder) / f"{name}.memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
