"""Decides on all ranks alike whether a step's probability error is too large to learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.losses.divergence import error_without_worst


def is_beyond_limit(
    metrics: Sequence[Mapping[str, Tensor]], limit: float, tokens: float, device: torch.device | str
) -> bool:
    """True if the step's error without its worst token is too large.

    Collective over all ranks. NaN is not above it: the gradient is NaN too, and its error names the responses.

    Args:
        metrics: the loss function's metrics by microbatch, each of shape []; empty on ranks without the loss.
        limit: largest token_mult_prob_error to learn from.
        tokens: tokens in the loss, of all ranks.
        device: device of the ranks' tensors.
    """
    # A row a rank, so that one collective brings both the sum of the errors and the largest: on a CPU its time is that
    # of waking the other ranks. Ranks without the loss have zeros, which neither adds to the sum nor is the largest.
    rows = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64, device=device)
    row = rows[dist.get_rank()]
    for microbatch in metrics:
        row[0] += microbatch["token_mult_prob_error"]
        row[1] = torch.maximum(row[1], microbatch["token_mult_prob_error_max"].double())
    dist.all_reduce(rows)
    error, worst = rows[:, 0].sum(), rows[:, 1].amax()
    return error_without_worst(error.item(), worst.item(), tokens) > limit
