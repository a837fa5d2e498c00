"""The Ray actor around one rank of the policy or of the value model."""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megatron_grpo.cluster.actor_processes import list_own_processes
from megatron_grpo.cluster.allocators import choose_cuda_settings
from megatron_grpo.cluster.machines import prepare_network
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.cluster.ray_cluster import find_node_address, list_assigned_gpus
from megatron_grpo.platform.cudnn import choose_cudnn, require_one_cudnn
from megatron_grpo.trainer.messages import ForwardResult, RankReport, RankSettings, RankTrainResult, ReplicaWork

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from megatron_grpo.batch.step_batch import StepBatch
    from megatron_grpo.batch.token_batch import TokenBatch
    from megatron_grpo.losses.loss import GlobalCounts, LossFunction
    from megatron_grpo.trainer.rank import ModelRank
    from megatron_grpo.trainer.zero_gradients import ZeroGradients


def choose_fp8_scales() -> None:
    """Give Transformer Engine's FP8 blocks the scales of engines; before its import."""
    import torch

    # Its default is powers of two. Engines and refits have float32 scales, which GPUs before Blackwell can multiply.
    if torch.cuda.get_device_capability() < (10, 0):
        os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")


def _find_finite(values: Tensor) -> Tensor:
    """Find rows without infinite or undefined numbers: [rows], bool."""
    return values.isfinite().flatten(1).all(dim=1) if values.dim() > 1 else values.isfinite()


class RankActor:
    """Ray actor around one rank's model.

    Heavy packages are imported in methods, because the driver imports this module.
    """

    model: ModelRank

    def __init__(self, name: str, rank: int, threads: int) -> None:
        begin_process_log(name)
        prepare_network(find_node_address())
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is first imported, in `import_packages`
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when CUDA starts (`initialize_parallel`)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", choose_cuda_settings())
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")  # as in engines (`generation.engine`)
        self.name, self.rank, self.threads = name, rank, threads
        self._imports_s = 0.0
        self._zero_gradients: ZeroGradients | None = None  # from the first optimizer step on

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the ranks' rendezvous store; returns its address."""
        from megatron_grpo.platform.device import open_store

        self.store = open_store(find_node_address(), timeout_s)
        return self.store.host, self.store.port

    def list_gpus(self) -> list[str]:
        """List Ray's ids of this process's GPUs; empty on a CPU."""
        return list_assigned_gpus()

    @phase("import packages")
    def import_packages(self) -> None:
        """Import torch and Megatron-Core, most of a small model's start-up time."""
        began = time.monotonic()
        gc.disable()  # a fifth of the time of these imports
        # Megatron-Core imports wandb where it is installed, whose temporary folders outlive a process that Ray ends.
        sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # None: an import fails
        from megatron_grpo.platform.device import detect_platform, require_gpus
        from megatron_grpo.platform.hooks import check_hooks

        require_gpus(self.list_gpus())
        if detect_platform().name == "cpu":
            from megatron_grpo.platform.megatron_on_cpu import apply_patches

            apply_patches()
        else:
            choose_cudnn()
            choose_fp8_scales()
        importlib.import_module("megatron_grpo.trainer.rank")
        check_hooks(detect_platform().name)
        require_one_cudnn()
        gc.enable()
        self._imports_s += time.monotonic() - began

    @phase("start")
    def start(self, settings: RankSettings, store_address: tuple[str, int]) -> RankReport:
        """Join the other ranks and build this rank's model."""
        self.import_packages()
        began = time.monotonic()
        import torch
        from megatron.core import parallel_state

        from megatron_grpo.models.source import require_folder
        from megatron_grpo.platform.device import connect_store, detect_platform
        from megatron_grpo.trainer.parallel import forbid_tf32, initialize_parallel, make_deterministic
        from megatron_grpo.trainer.rank import PolicyRank, TeacherRank, ValueRank

        require_folder(settings.folder)
        if detect_platform().name == "cpu":
            torch.set_num_threads(self.threads)
        elif settings.config.deterministic:
            make_deterministic()
        if settings.config.precision == "float32":
            forbid_tf32()
        timeout_s = settings.config.timeout_s
        store = connect_store(*store_address, timeout_s)
        initialize_parallel(
            settings.config.parallel, rank=self.rank, store=store, seed=settings.seed, timeout_s=timeout_s
        )
        if settings.teacher is not None:
            self.model = TeacherRank(settings)
        elif settings.shape.head.is_scalar:
            self.model = ValueRank(settings)
        else:
            self.model = PolicyRank(settings)
        gc.freeze()  # start-up objects live for ever; a full collection over them takes a third of a second
        return RankReport(
            data_rank=parallel_state.get_data_parallel_rank(),
            device_name=torch.cuda.get_device_name() if detect_platform().name == "cuda" else "cpu",
            startup_s={"imports": self._imports_s, "model": time.monotonic() - began},
            processes=list_own_processes(),
        )

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(this rank's model, ...); `ModelRanks.submit` types the arguments."""
        with phase(function.__name__.strip("_")):
            return function(self.model, *args, **kwargs)

    def act(self, name: str, action: Callable[..., Any]) -> Any:
        """Return action(this rank's model), in a phase of this name."""
        with phase(name):
            return action(self.model)

    @phase("train")
    def train(
        self, work: ReplicaWork, loss_fn: LossFunction, counts: GlobalCounts, limit: float | None = None
    ) -> RankTrainResult:
        """Make one optimizer step on the replica's work (`ModelRank.train`)."""
        from megatron_grpo.trainer.rank_speed import measure_probe
        from megatron_grpo.trainer.zero_gradients import ZeroGradients

        batch, microbatches = work
        result = self.model.train(self._fetch(batch, loss_fn), microbatches, loss_fn, counts, limit)
        if result.is_refused or not 0 < result.grad_norm < math.inf:
            return result
        self._zero_gradients = self._zero_gradients or ZeroGradients(self.model)
        probe_s = measure_probe(self.model.platform.device)
        return replace(result, zero_gradients=self._zero_gradients.find(), probe_s=probe_s)

    def list_trained_tensors(self) -> list[str]:
        """List the trained tensors of which this rank has a part."""
        return self._zero_gradients.list_names() if self._zero_gradients is not None else []

    @phase("watch states")
    def watch_states(self, in_replica: NDArray[np.int64], in_step: NDArray[np.int64]) -> None:
        self.model.recorder.watch(in_replica, in_step)

    def compute(self, work: ReplicaWork, field: str) -> ForwardResult | None:
        """Store a field of `ModelRank.outputs`; None except on the output rank."""
        import numpy as np
        import torch

        from megatron_grpo.batch.token_batch import require_field

        with phase(field.removeprefix("prev_")):
            batch, microbatches = work
            tokens = self._fetch(batch, None)
            values = self.model.outputs[field](self.model, tokens, microbatches)
            if values is None:
                return None
            # By sequence, because the flags of all hidden states take half as much memory as these.
            is_finite = torch.cat([_find_finite(part) for part in values.split(tokens.lengths)])
            is_usable = is_finite.logical_or(require_field(tokens.fields.sampled).logical_not())
            if field == "prev_logprobs" and self.model.settings.token_filter is not None:
                # The filter of sampling removes these tokens, and the loss leaves them out.
                is_usable |= values.isneginf()
            ends = np.cumsum([int(batch.lengths[partition].sum()) for partition in batch.partitions])
            # NumPy has no bfloat16: hidden states in it are stored as their bits.
            array = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
            references = [ray.put(part) for part in np.split(array, ends[:-1])]
            return references, np.array([bool(flags.all()) for flags in is_usable.split(tokens.lengths)])

    def _fetch(self, batch: StepBatch, loss_fn: LossFunction | None) -> TokenBatch:
        from megatron_grpo.batch.token_batch import TokenBatch

        # Only the fields that this rank's stage reads travel to its node.
        names = [name for name in self.model.list_needed_fields(loss_fn) if name in batch.fields]
        with phase("fetch tokens"):  # waits for partitions that are still in transfer
            arrays = iter(ray.get([reference for name in names for reference in batch.fields[name]]))
        parts = {name: [next(arrays) for _ in batch.partitions] for name in names}
        if self.model.routing is not None and "routed_experts" in parts:  # of all layers, by far the largest field
            parts["routed_experts"] = [self.model.routing.select_layers(part) for part in parts["routed_experts"]]
        return TokenBatch.from_replica(batch, parts)

    @phase("begin_profile")
    def begin_profile(self) -> None:
        """Record this process's operators and memory until `end_profile`."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=200_000)  # the latest allocations
        self._profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._profiler.start()

    @phase("end_profile")
    def end_profile(self, folder: str) -> None:
        """Write RANK.json, a trace for chrome://tracing or Perfetto, and on a GPU RANK.memory.pickle."""
        import torch

        file = Path(folder) / self.name.replace(" ", "_")
        self._profiler.stop()
        self._profiler.export_chrome_trace(f"{file}.json")
        del self._profiler
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{file}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
