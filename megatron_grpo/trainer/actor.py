"""The Ray actor around one rank of the policy or of the value model."""

from __future__ import annotations

import gc
import importlib
import operator
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.trainer.messages import ForwardShare, RankReport, RankSettings, ReplicaWork

if TYPE_CHECKING:
    from megatron_grpo.batch.step_batch import StepBatch


ALLOCATOR = "expandable_segments:True,pinned_max_cached_size_mb:64"
"""Settings of torch's memory on GPUs (PYTORCH_ALLOC_CONF): expandable segments, because microbatches of many sizes
fragment segments of fixed size; and pinned blocks above 64 MB at their exact size, not rounded to a power of two."""

MEMORY_EVENTS = 200_000
"""Most allocations in a memory snapshot, which lists the latest ones."""


class RankActor:
    """Ray actor: holds a rank's model, fetches the fields of its batches, and runs functions on the model."""

    def __init__(self, name: str, rank: int, threads: int) -> None:
        begin_process_log(name)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is first imported, in `import_packages`
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when CUDA starts (`initialize_parallel`)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)
        self.name, self.rank, self.threads = name, rank, threads
        self._imports_s = 0.0

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the ranks' rendezvous store in this process; returns its address."""
        from megatron_grpo.cluster.ray_cluster import node_address
        from megatron_grpo.platform.device import open_store

        self.store = open_store(node_address(), timeout_s)
        return self.store.host, self.store.port

    def gpus(self) -> list[str]:
        """Ray's ids of this process's GPUs: one, or none on a CPU."""
        from megatron_grpo.cluster.ray_cluster import assigned_gpus

        return assigned_gpus()

    @phase("import packages")
    def import_packages(self) -> None:
        """Import torch and Megatron-Core: most of the time that a rank takes to start on a small model."""
        began = time.monotonic()
        # Megatron-Core imports wandb where it is installed, whose temporary folders outlive a process that Ray ends.
        sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # None: an import fails
        from megatron_grpo.platform.device import current_platform, require_gpus
        from megatron_grpo.platform.hooks import check_hooks

        require_gpus(self.gpus())
        if current_platform().name == "cpu":
            from megatron_grpo.platform.megatron_on_cpu import apply_patches

            apply_patches()
        importlib.import_module("megatron_grpo.trainer.rank")
        check_hooks(current_platform().name)
        self._imports_s += time.monotonic() - began

    @phase("start")
    def start(self, settings: RankSettings, store_address: tuple[str, int]) -> RankReport:
        """Join the group, build the model and load this rank's weights."""
        self.import_packages()
        began = time.monotonic()
        import torch
        from megatron.core import parallel_state

        from megatron_grpo.models.source import require_folder
        from megatron_grpo.platform.device import current_platform, reach_store
        from megatron_grpo.trainer.parallel import initialize_parallel, make_deterministic
        from megatron_grpo.trainer.rank import PolicyRank, ValueRank

        require_folder(settings.folder)
        if current_platform().name == "cpu":
            torch.set_num_threads(self.threads)
        elif settings.config.deterministic:
            make_deterministic()
        initialize_parallel(
            settings.config.parallel,
            rank=self.rank,
            store=reach_store(*store_address, settings.config.timeout_s),
            seed=settings.seed,
            timeout_s=settings.config.timeout_s,
        )
        self.model = (PolicyRank if settings.shape.value_head is None else ValueRank)(settings)
        gc.freeze()  # start-up objects live for ever; a full collection over them takes a third of a second
        return RankReport(
            data=parallel_state.get_data_parallel_rank(),
            device_name=torch.cuda.get_device_name() if current_platform().name == "cuda" else "cpu",
            startup_s={"imports": self._imports_s, "model": time.monotonic() - began},
        )

    def run(self, fn: Callable[..., Any] | str, *args: Any) -> Any:
        """Return fn(this rank's model, *args); a string names a method of the model or a part ("checkpoint.save")."""
        if isinstance(fn, str):
            with phase(fn):
                return operator.attrgetter(fn)(self.model)(*args)
        with phase(fn.__name__.strip("_")):
            return fn(self.model, *args)

    @phase("train")
    def train(self, work: ReplicaWork, loss_fn: Any, counts: Any, limit: float | None = None) -> Any:
        """One optimizer step on the replica's work (`ModelRank.train`)."""
        batch, microbatches = work
        return self.model.train(self._fetch(batch, loss_fn), microbatches, loss_fn, counts, limit)

    def forward(self, work: ReplicaWork, method: str) -> ForwardShare | None:
        """Put a number for every token of the replica's shards into the object store; None except on the output rank.

        Args:
            work: the replica's part of the batch, and microbatches that hold all of its sequences.
            method: name of the method of the rank's model that computes the numbers.
        """
        import numpy as np
        import ray

        batch, microbatches = work
        with phase(method):
            tokens = self._fetch(batch, None)
            values = getattr(self.model, method)(tokens, microbatches)
        if values is None:
            return None
        usable = values.isfinite().logical_or(tokens.fields.sampled.logical_not())
        if method == "logprobs" and self.model.settings.token_filter is not None:
            usable |= values.isneginf()  # the filter of sampling removes the token, and the loss leaves it out
        of_sequences = usable.split(tokens.lengths)
        ends = np.cumsum([int(batch.lengths[shard].sum()) for shard in batch.shards])
        return ForwardShare(
            shards=[ray.put(part) for part in np.split(values.numpy(), ends[:-1])],
            finite=np.array([bool(piece.all()) for piece in of_sequences]),
        )

    def _fetch(self, batch: StepBatch, loss_fn: Any) -> Any:
        """Get from the object store the fields that this rank's stage reads; no others are moved to its node."""
        import ray

        from megatron_grpo.batch.token_batch import TokenBatch

        wanted = [name for name in self.model.list_needed_fields(loss_fn) if name in batch.fields]
        with phase("fetch tokens"):  # waits for shards that are still in transfer
            arrays = iter(ray.get([reference for name in wanted for reference in batch.fields[name]]))
        return TokenBatch.of_replica(batch, {name: [next(arrays) for _ in batch.shards] for name in wanted})

    @phase("begin_profile")
    def begin_profile(self) -> None:
        """Record this process's operators and memory until `end_profile`."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._profiler.start()

    @phase("end_profile")
    def end_profile(self, folder: str) -> None:
        """Stop recording; write RANK.json (a trace for chrome://tracing or Perfetto) and on a GPU RANK.memory.pickle.

        Args:
            folder: an existing folder; every rank's files have names of their own.
        """
        import torch

        file = Path(folder) / self.name.replace(" ", "_")
        self._profiler.stop()
        self._profiler.export_chrome_trace(f"{file}.json")
        del self._profiler
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{file}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
