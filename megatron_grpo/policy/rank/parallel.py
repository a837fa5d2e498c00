"""Process groups of one policy rank: torch.distributed and Megatron-Core's parallel state."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import Store

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.platform.device import current_platform
from megatron_grpo.platform.megatron_cpu import apply_patches
from megatron_grpo.platform.pipeline_shapes import let_stages_tell_shapes


def initialize_parallel(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    store: Store,
    seed: int,
    timeout_s: float,
) -> None:
    """Join the other ranks, form the tensor, context, expert, data and pipeline groups, and seed the random states.

    Args:
        parallel: their sizes multiply to world_size.
        rank: number of the calling process; consecutive ranks are first of all tensor-parallel neighbours.
        store: store in which the ranks meet.
        timeout_s: after which starting up, or any later collective, fails.
    """
    assert parallel.world_size == world_size, f"a layout of {parallel.world_size} ranks was started with {world_size}"
    apply_patches()
    let_stages_tell_shapes()
    platform = current_platform()
    # Megatron-Core counts on one hardware queue to order a layer's communication before its computation; it complains
    # about anything else even without a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if platform.name == "cuda":
        torch.cuda.set_device(platform.device)
    dist.init_process_group(
        platform.backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy_parallel() -> None:
    """Undo `initialize_parallel`, so that this process could start in another layout; idempotent."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
