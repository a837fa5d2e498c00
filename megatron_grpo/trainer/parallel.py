"""Process groups of a rank, and the exchange of tensors between pipeline stages."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import Store

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.platform.adamw_state import patch_state_of_adamw
from megatron_grpo.platform.device import Platform, detect_platform


class StageCommunicator(P2PCommunicator):
    """Exchanges hidden states and gradients between the pipeline stages of a step.

    Packed microbatches differ in length, so Megatron-Core's own communicator sends the shape of each tensor before it,
    and waits for the device to read it: launches then cannot run ahead of the device. All stages have the same
    microbatches, thus know the shapes of what comes, if they know in which order it comes. A stage receives the hidden
    states of a group of `microbatch_group_size_per_vp_stage` microbatches for one of its chunks, then for the next; the
    first chunk of the first stage receives none. Gradients come in the same order of microbatches, but for the last
    chunk of the last stage.
    """

    def __init__(self, config: Any, shapes: Sequence[Sequence[int]], *, forward_only: bool) -> None:
        """Take the shape of each microbatch's hidden states on this rank, [tokens, 1, hidden]."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        size = config.microbatch_group_size_per_vp_stage if chunks > 1 else len(shapes)
        groups = [list(shapes[begin : begin + size]) for begin in range(0, len(shapes), size)]
        states, gradients = chunks - self.is_pp_first_stage, chunks - self.is_pp_last_stage
        self._states = deque(shape for group in groups for shape in group * states)
        self._gradients = deque(shape for group in groups for shape in group * (0 if forward_only else gradients))

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return (
            list(self._states.popleft()) if recv_prev else [0, 0, 0],
            list(self._gradients.popleft()) if recv_next else [0, 0, 0],
        )

    def end(self) -> None:
        """Check that all tensors of the step have come."""
        missing = len(self._states), len(self._gradients)
        assert missing == (0, 0), f"hidden states and gradients that have not come: {missing}"


def collect_schedule_groups() -> ProcessGroupCollection:
    """Collect the process groups that Megatron-Core's schedules want beside a communicator."""
    names = ["tp", "cp", "embd", "pos_embd", "pp", "dp", "dp_cp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


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
    """Make libraries multiply float32 in float32.

    Called before CUDA starts. Transformer Engine asks cuBLAS for TF32 whatever torch's setting is, and Megatron-Core's
    routers use its products: on an H200 log-probabilities of mixtures in float32 were off by 2e-4 to 9e-4.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


def destroy_parallel() -> None:
    """Undo `initialize_parallel`, so that another layout can follow; idempotent."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
