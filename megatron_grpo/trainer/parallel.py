"""Process groups of a rank, and the exchange of shapes between pipeline stages."""

from __future__ import annotations

import os
from collections import deque
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import p2p_communication as p2p
from torch import Tensor
from torch.distributed import Store

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.platform.adamw_state import patch_state_of_adamw
from megatron_grpo.platform.device import Platform, detect_platform


@cache
def exchange_shapes_in_order() -> None:
    """Make interleaved stages exchange shapes in the order of their tensors; idempotent.

    Packed microbatches differ in length, so a stage must learn the shape [tokens, 1, hidden] of a tensor before it can
    receive it. Without interleaving, Megatron-Core's own exchange works and is used: a batch of sends and receives,
    then a wait for all of it. Interleaved, it breaks twice. A step sends an activation to the next stage and a gradient
    to the previous one, and with two stages these are the same peer: a batch matches messages by their order on that
    connection, so the shape of the activation arrives as that of the gradient. And a stage of the interleaved schedule
    may send now what its peer receives only in its next step; when each waits for its sends, both wait for ever. Here
    shapes go through the same function as the tensors, `_p2p_ops`, which orders sends and receives by even and odd
    ranks, and only receives are waited for.
    """
    original = p2p.P2PCommunicator._communicate_shapes
    in_flight: deque[Any] = deque(maxlen=16)  # tensors of the latest exchanges, whose sends may not have ended

    def communicate_shapes(
        self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        if self.virtual_pipeline_model_parallel_size is None:
            return original(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        device = self.config.platform.device
        previous, following = (
            torch.empty(3, dtype=torch.int64, device=device) if receives else None
            for receives in (recv_prev, recv_next)
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
        for name in ("recv_prev", "recv_next"):  # never for sends: the peer may have to send first
            if name in requests:
                requests.pop(name).wait()
        in_flight.append((requests, to_previous, to_next))
        return (
            [0, 0, 0] if previous is None else previous.tolist(),
            [0, 0, 0] if following is None else following.tolist(),
        )

    p2p.P2PCommunicator._communicate_shapes = communicate_shapes


def initialize_parallel(
    parallel: ParallelConfig, *, rank: int, store: Store, seed: int, timeout_s: float, platform: Platform | None = None
) -> None:
    """Join the other ranks, form process groups, seed random states."""
    platform = platform or detect_platform()
    if platform.name != "cuda":
        from megatron_grpo.platform.megatron_on_cpu import apply_patches

        apply_patches()
    else:
        from megatron.core.optimizer import distrib_optimizer

        if not distrib_optimizer.HAVE_APEX_OR_TE:
            patch_state_of_adamw()
    exchange_shapes_in_order()
    # One hardware queue orders a layer's communication before its computation; Megatron-Core checks it even on CPUs.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if platform.name == "cuda":
        torch.cuda.set_device(platform.device)
    dist.init_process_group(
        platform.backend,
        store=store,
        rank=rank,
        world_size=parallel.world_size,
        timeout=timedelta(seconds=timeout_s),  # of the start-up and of every later collective
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


def make_deterministic() -> None:
    """Make torch, cuBLAS and NCCL deterministic, before the first product and communicator."""
    # Otherwise Megatron-Core's unpermutation of tokens adds in the order in which threads arrive. torch then refuses
    # operations that have no deterministic form.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)


def forbid_tf32() -> None:
    """Make libraries compute products of float32 in float32, before CUDA starts.

    Transformer Engine asks cuBLAS for TF32 whatever torch's setting is, and Megatron-Core's routers use its products:
    on an H200 log-probabilities of mixtures in float32 were off by 2e-4 to 9e-4.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


def destroy_parallel() -> None:
    """Undo `initialize_parallel`, so that another layout can follow; idempotent."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
