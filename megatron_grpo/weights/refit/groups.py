"""Runs on ranks of the policy and in engines' workers: process groups of a refit, NCCL on CUDA and gloo on CPU.

They are made without torch's default group, which each of the two sides has for itself.
"""

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
"""Time to reach a store, less than `transport.SETTLE_S`. A store listens before its address is sent, so a store that
cannot be reached was closed, because another member of the attempt has failed."""


class Group(Protocol):
    """The methods of torch's process groups that are used here; its type stubs lack them."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Start sending rank `root`'s tensor, flat [bytes], uint8, into the tensors of all others."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Start sending one tensor to a rank, which must receive it under the same tag."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Start receiving one tensor from a rank."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the store through which the members of the groups find each other."""

    host: str
    port: int
    receivers: int
    """Workers of all engines."""
    timeout_s: float
    """Limit in seconds of joining a group, and of each transfer."""
    same_gpus: bool = False
    """Whether both sides compute on the same GPUs, where NCCL cannot be used: it allows one rank a GPU."""

    @property
    def timeout(self) -> timedelta:
        """timeout_s as a timedelta, the type that torch's groups take."""
        return timedelta(seconds=self.timeout_s)

    def store(self) -> Store:
        """A client of the store at this address.

        Raises:
            RuntimeError: no store listens at the address within REACH_S.
        """
        store = reach_store(self.host, self.port, min(self.timeout_s, REACH_S))
        store.set_timeout(self.timeout)  # for others' keys
        return store


def join(rendezvous: Rendezvous, name: str, rank: int, size: int, device: torch.device) -> Group:
    """Join the group of this name; returns when all `size` members have joined.

    Raises:
        RuntimeError: a member did not join within the timeout.
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
    """Leave the group when the body fails, which closes its connections, so that the other members fail at once.

    A group lives as long as any reference to it or to a pending transfer, and the traceback of an error keeps the local
    variables of all functions it has passed; so these are cleared.

    Args:
        leave: drops the group.
    """
    try:
        yield
    except BaseException as error:
        passed: BaseException | None = error
        while passed is not None:
            traceback.clear_frames(passed.__traceback__)  # frames of functions that have returned
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
    """Groups made inside raise from wait() at their timeout; NCCL's default ends the process."""
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
    """The local address that reaches this host: gloo would choose the host name, which may not resolve."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
