"""Process groups of a refit, apart from everybody's default group: NCCL on CUDA, gloo on CPU."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from megatron_grpo.platform.device import reach_store

NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

REACH_S = 10.0
"""Time to find a store, less than whoever has failed is given to come back (diagnosis.SETTLE_S): a store listens before
anybody is told of it, so one that is not found was closed, since another member of the attempt has failed."""


class Group(Protocol):
    """The part of torch's process groups that is used here; its type stubs leave it out."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Begin to send rank `root`'s tensor, flat [bytes], uint8, into everybody else's."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to send one tensor to a rank, which must receive it under the same tag."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to receive one tensor from a rank."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of the groups meet."""

    host: str
    port: int
    receivers: int
    """Generation workers of all engines."""
    timeout_s: float
    """Seconds that meeting, and each transfer, may take."""
    same_gpus: bool = False
    """Whether both sides compute on the same devices, so that NCCL, which has one rank a GPU, is no way."""

    @property
    def timeout(self) -> timedelta:
        """timeout_s as a timedelta, the type that torch's groups take."""
        return timedelta(seconds=self.timeout_s)

    def store(self) -> Store:
        """A client of the store at this address.

        Raises:
            RuntimeError: nothing listens there, within REACH_S.
        """
        store = reach_store(self.host, self.port, min(self.timeout_s, REACH_S))
        store.set_timeout(self.timeout)  # for others' keys
        return store


def join(rendezvous: Rendezvous, name: str, rank: int, size: int, device: torch.device) -> Group:
    """Enter the group of this name; returns when all `size` members have.

    Raises:
        RuntimeError: not everybody came within the timeout.
    """
    store = PrefixStore(f"refit/{name}", rendezvous.store())
    if device.type == "cuda":
        return _join_nccl(store, rank, size, rendezvous.timeout)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the constructor that takes a device
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_own_address_towards(rendezvous.host))]
    options._timeout = rendezvous.timeout
    return cast("Group", gloo(store, rank, size, options))


@contextmanager
def leave_on_failure(leave: Callable[[], object]) -> Iterator[None]:
    """Let others know at once when what happens inside fails: a member that leaves its group closes its connections.

    A group lasts as long as a transfer under way, and an error keeps the variables of all functions that it has passed.

    Args:
        leave: drops the group.
    """
    try:
        yield
    except BaseException as error:
        passed: BaseException | None = error
        while passed is not None:
            traceback.clear_frames(passed.__traceback__)  # of functions that are over
            passed = passed.__cause__ or passed.__context__
        leave()
        raise


def _join_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_wait():
        return cast("Group", ProcessGroupNCCL(store, rank, size, options))


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """A group made inside raises from wait() at its timeout, where others would end the process."""
    before = os.environ.get(NCCL_BLOCKING_WAIT)
    os.environ[NCCL_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NCCL_BLOCKING_WAIT]
        else:
            os.environ[NCCL_BLOCKING_WAIT] = before


def _own_address_towards(host: str) -> str:
    """The local address that reaches this host: gloo's own choice is the host name, which need not resolve."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
