"""Losses whose responses two context-parallel ranks share, here threads: loss and gradient are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from megatron_grpo.losses.loss import Segments
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.support.loss_oracle import CONFIGS, counts_of, random_batch
from tests.support.token_fields import mapped

RANKS = 2


def make_sums() -> Callable[[int], Callable[[Tensor], Tensor]]:
    """The sum over ranks, for each rank: all of them call it in the same order."""
    barrier, values_by_rank = Barrier(RANKS, timeout=60), [torch.zeros(0)] * RANKS

    def make_sum(rank: int) -> Callable[[Tensor], Tensor]:
        def sum_over_ranks(values: Tensor) -> Tensor:
            values_by_rank[rank] = values
            barrier.wait()
            total = torch.stack(values_by_rank).sum(dim=0)
            barrier.wait()
            return total

        return sum_over_ranks

    return make_sum


@pytest.mark.parametrize("chunk", [1, 2], ids="chunks of {}".format)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_that_share_responses_have_the_loss_of_one_process(name: str, chunk: int) -> None:
    curr, tokens = random_batch(41)
    counts, loss_fn, mask = counts_of(tokens), ClippedPGLossFn(CONFIGS[name]), tokens.loss_mask > 0
    values_of_all = curr.clone().requires_grad_()
    expected, _ = loss_fn(values_of_all, tokens, counts)
    (gradient,) = torch.autograd.grad(expected, values_of_all)
    rows, columns = mask.nonzero(as_tuple=True)
    order, sizes, make_sum = torch.arange(len(rows)), mask.sum(dim=1).float(), make_sums()

    def compute(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        is_local = (columns // chunk) % RANKS == rank
        positions = rows[is_local], columns[is_local]
        segments = Segments(rows[is_local], sizes, make_sum(rank), order[is_local], len(rows))
        values = curr[positions].clone().requires_grad_()
        loss, _ = loss_fn(values, mapped(tokens, lambda field: field[positions]), counts, segments)
        return loss.detach(), is_local, torch.autograd.grad(loss, values)[0]

    with ThreadPoolExecutor(RANKS) as pool:
        shares = list(pool.map(compute, range(RANKS)))
    torch.testing.assert_close(shares[0][0] + shares[1][0], expected.detach())
    for _, is_local, local_gradient in shares:
        torch.testing.assert_close(local_gradient, gradient[mask][is_local])
