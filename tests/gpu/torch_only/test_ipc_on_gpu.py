"""Memory of a GPU that two processes have in common, as a refit between engines and ranks on one GPU uses it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_grpo.weights.refit.ipc import CudaMemory

pytestmark = pytest.mark.gpu


def double(address: Sequence[int]) -> None:
    """What the process at the other end does to the memory."""
    memory = CudaMemory.seen(address)
    assert memory is not None
    memory *= 2
    CudaMemory.settle()


def test_another_process_sees_it_and_writes_to_it() -> None:
    mine = CudaMemory(2**20 + 16)
    for _ in range(2):  # each process has an address of its own
        mine.tensor.copy_(torch.arange(2**20 + 16) % 100)
        CudaMemory.settle()
        other = torch.multiprocessing.get_context("spawn").Process(target=double, args=(mine.address(),))
        other.start()
        other.join(120)
        assert other.exitcode == 0
        assert torch.equal(mine.tensor.cpu(), (torch.arange(2**20 + 16) % 100 * 2).byte())
