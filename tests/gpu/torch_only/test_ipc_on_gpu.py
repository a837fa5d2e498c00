"""Memory that two processes have in common, as a refit between engines and ranks on one GPU uses it."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import environment
from megatron_grpo.weight_sync.shared_memory import CudaMemory, HostMemory

CONTEXT = multiprocessing.get_context("spawn")
Memory: Any = CudaMemory if torch.cuda.is_available() else HostMemory


def lend(borrower: dict[str, str], messages: Any) -> None:
    """Own memory that two processes in turn see and double; tell whether it then holds what they wrote."""
    memory = Memory(2**20 + 16)
    for _ in range(2):  # each process has an address of its own
        memory.tensor.copy_(torch.arange(2**20 + 16) % 100)
        Memory.synchronize()
        run(double_memory, borrower, memory.export_address())
        messages.send(torch.equal(memory.tensor.cpu(), (torch.arange(2**20 + 16) % 100 * 2).byte()))


def double_memory(address: Sequence[int]) -> None:
    memory = Memory.map_address(address)
    assert memory is not None
    memory *= 2
    Memory.synchronize()


def run(function: Callable[..., None], variables: dict[str, str], *args: Any) -> None:
    """A function in a process that starts with these environment variables."""
    process = CONTEXT.Process(target=function, args=args)
    with environment(**variables):
        process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"], ids=["torch's settings", "a rank's settings"])
def test_another_process_sees_it_and_writes_to_it(settings: str) -> None:
    shared = {"PYTORCH_ALLOC_CONF": settings}
    messages, tells = CONTEXT.Pipe(duplex=False)
    run(lend, shared, shared, tells)
    assert messages.recv()
    assert messages.recv()


@pytest.mark.gpu
def test_a_gpu_is_found_by_its_name_and_not_by_its_number() -> None:
    """The borrower sees two GPUs in the other order, as an engine that shares the GPUs of all ranks does."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and this machine has {torch.cuda.device_count()}")
    first, second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    messages, tells = CONTEXT.Pipe(duplex=False)
    run(lend, {"CUDA_VISIBLE_DEVICES": first}, {"CUDA_VISIBLE_DEVICES": f"{second},{first}"}, tells)
    assert messages.recv()
