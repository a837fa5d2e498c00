"""Decides on all ranks alike whether a step's probability error is too large to learn from the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.losses.divergence import error_without_worst


def is_beyond_limit(
    metrics: Sequence[Mapping[str, Tensor]], limit: float, tokens: float, device: torch.device | str
) -> bool:
    """Whether the step's error, without its worst token, is above the limit; collective over all ranks.

    NaN is not above it: the gradient is NaN too, and its error names the responses.

    Args:
        metrics: the loss function's metrics by microbatch, each of shape []; empty on ranks without the loss.
        limit: largest token_mult_prob_error to learn from.
        tokens: tokens in the loss, of all ranks.
        device: device of the ranks' tensors.
    """
    # Shares of a mean add up over microbatches, context-parallel ranks and replicas; other ranks add nothing.
    error = torch.zeros((), dtype=torch.float64, device=device)
    worst = torch.full((), -torch.inf, dtype=torch.float64, device=device)
    for microbatch in metrics:
        error += microbatch["token_mult_prob_error"]
        worst = torch.maximum(worst, microbatch["token_mult_prob_error_max"].double())
    dist.all_reduce(error)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return error_without_worst(error.item(), worst.item(), tokens) > limit
