"""Process groups between one policy rank and all generation workers, apart from everybody's default group."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from megatron_grpo.cluster.rendezvous import reach_store
from megatron_grpo.refit.buckets import Bucket, plan_buckets

NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class Group(Protocol):
    """The part of torch's process groups that is used here; its type stubs leave it out."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Begin to send rank `root`'s tensor, flat [bytes], uint8, into everybody else's."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of the groups meet, one group per pipeline stage of the policy."""

    host: str
    port: int
    receivers: int
    """Generation workers of all engines; a group's size is this plus one, the sender being rank 0."""
    timeout_s: float
    """Seconds that meeting, and each transfer, may take."""

    @property
    def timeout(self) -> timedelta:
        """timeout_s as a timedelta, the type that torch's groups take."""
        return timedelta(seconds=self.timeout_s)

    def store(self) -> Store:
        """A client of the store at this address."""
        return reach_store(self.host, self.port, self.timeout_s)


def write_plan(store: Store, stage: int, stages: int, buckets: list[Bucket], bucket_bytes: int) -> None:
    """Tell the receivers what one of the stages will send: names, types and shapes, since both sides plan alike."""
    slots = [slot for bucket in buckets for slot in bucket.slots]
    tensors = [(slot.name, str(slot.dtype).removeprefix("torch."), slot.shape) for slot in slots]
    store.set(f"plan/{stage}", json.dumps({"bucket_bytes": bucket_bytes, "tensors": tensors}))
    store.set("stages", str(stages))


def read_plans(store: Store) -> list[list[Bucket]]:
    """What every stage will send, by stage; waits until their senders have written it."""
    plans = [json.loads(store.get(f"plan/{stage}")) for stage in range(int(store.get("stages")))]
    return [plan_buckets(plan["tensors"], plan["bucket_bytes"]) for plan in plans]


def join(rendezvous: Rendezvous, stage: int, rank: int, device: torch.device) -> Group:
    """Enter the group of one stage; returns when all members have. NCCL on CUDA, gloo on CPU.

    Raises:
        RuntimeError: not everybody came within the timeout.
    """
    store = PrefixStore(f"refit/{stage}", rendezvous.store())
    size = rendezvous.receivers + 1
    if device.type == "cuda":
        return _join_nccl(store, rank, size, rendezvous.timeout)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the constructor that takes a device
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_own_address_towards(rendezvous.host))]
    options._timeout = rendezvous.timeout
    return cast("Group", gloo(store, rank, size, options))


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
