"""How a refit's group ends over NCCL when a member is gone or silent: how long the other one waits, torch alone."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.refit_group import FAILURE_CHECK_S, Rendezvous, Watch, join_group, record_failure

CUDA = torch.cuda.is_available()
CONTEXT = multiprocessing.get_context("spawn")
SETTLE_S = 15.0
"""As `transport.SETTLE_S`, which cannot be imported without Ray."""
START_S = 120.0
NUMBERS = 2**20


def run_member(rank: int, rendezvous: Rendezvous, fault: str, messages: Any) -> None:
    """Exchange one message; then the second member is gone or silent, and the first waits for another message."""
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    group, watch = join_group(rendezvous, rank, 2, device), Watch(rendezvous.connect(), START_S)
    buffer = torch.full((NUMBERS,), rank, dtype=torch.uint8, device=device)
    move = group.send if rank else group.recv
    first = move([buffer], 1 - rank, 0)
    watch.wait_until(first.is_completed)
    first.wait()
    messages.send(bool((buffer == 1).all()))
    if rank:
        os.kill(os.getpid(), signal.SIGKILL) if fault == "gone" else time.sleep(600)
    pending, began = group.recv([buffer], 1, 0), time.monotonic()
    try:
        watch.wait_until(pending.is_completed)
        pending.wait()
        reason = ""
    except RuntimeError as error:
        reason = str(error)
    waited_s, began = time.monotonic() - began, time.monotonic()
    group.abort()
    aborted_s = time.monotonic() - began
    usable = (torch.ones(8, device=device) * 2).sum().item() == 16
    messages.send((reason, waited_s, aborted_s, usable))


@pytest.mark.parametrize("fault", ["gone", "silent"])
def test_the_other_member_is_told_and_its_abort_returns(
    fault: str, record_property: Callable[[str, object], None]
) -> None:
    if CUDA and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and this machine has {torch.cuda.device_count()}")
    store = open_store("127.0.0.1", START_S)
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=1, timeout_s=START_S)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    members = [
        CONTEXT.Process(target=run_member, args=(rank, rendezvous, fault, tells))
        for rank, (_, tells) in enumerate(pipes)
    ]
    for process in members:
        process.start()
    try:
        for answers, _ in pipes:
            assert answers.poll(START_S)
            assert answers.recv(), "other bytes came"
        time.sleep(1.0)
        record_failure(store, "generation engine 0 died")
        answers, _ = pipes[0]
        assert answers.poll(2 * SETTLE_S), "an abort that blocks"
        reason, waited_s, aborted_s, usable = answers.recv()
    finally:
        for process in members:
            process.kill()
    record_property("seconds", {"waited": waited_s, "aborted": aborted_s})
    assert reason
    assert fault == "gone" or reason == "given up, because generation engine 0 died"
    assert waited_s < 1.0 + 10 * FAILURE_CHECK_S
    assert aborted_s < SETTLE_S
    assert usable, "the device computes on after the abort"
