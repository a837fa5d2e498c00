"""Process groups of one policy rank: torch.distributed and Megatron-Core's parallel state."""

from __future__ import annotations

import os
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import p2p_communication as p2p
from torch import Tensor
from torch.distributed import Store

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.cpu.megatron import apply_patches
from megatron_grpo.platform.device import current_platform

_KEPT = 16
"""Messages that may be on their way: their memory must live until they have arrived."""

_told = False
"""Whether this process has the repair."""


def let_stages_tell_shapes() -> None:
    """Have interleaved stages tell each other shapes in the way and order of the tensors that follow; idempotent.

    Megatron-Core sends both shapes of a step in one batch and waits for all of it. Two stages have one peer in both
    directions, so that the shapes of the forward and of the backward pass change places; and where a stage only
    receives later what another is sending now, both wait for ever.
    """
    global _told
    if _told:
        return
    _told = True
    original = p2p.P2PCommunicator._communicate_shapes
    on_their_way: deque[Any] = deque(maxlen=_KEPT)

    def communicate_shapes(
        self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        if self.virtual_pipeline_model_parallel_size is None:
            shapes: tuple[list[int], list[int]] = original(
                self, tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
            return shapes
        device = current_platform().device
        previous, following = (
            torch.empty(3, dtype=torch.int64, device=device) if wanted else None for wanted in (recv_prev, recv_next)
        )
        to_previous, to_next = (
            None if tensor is None else torch.tensor(tensor.shape, device=device)
            for tensor in (tensor_send_prev, tensor_send_next)
        )
        requests = p2p._p2p_ops(
            tensor_send_prev=to_previous,
            tensor_recv_prev=previous,
            tensor_send_next=to_next,
            tensor_recv_next=following,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for kind in ("recv_prev", "recv_next"):  # never for what is sent: the other may first send itself
            if kind in requests:
                requests.pop(kind).wait()
        on_their_way.append((requests, to_previous, to_next))
        return (
            [0, 0, 0] if previous is None else previous.tolist(),
            [0, 0, 0] if following is None else following.tolist(),
        )

    p2p.P2PCommunicator._communicate_shapes = communicate_shapes


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
