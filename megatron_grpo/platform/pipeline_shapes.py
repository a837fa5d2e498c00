"""Interleaved pipelines whose microbatches differ in length, which Megatron-Core 0.16 mixes up on any device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication as p2p
from torch import Tensor

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
