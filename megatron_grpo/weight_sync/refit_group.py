"""The process group of a refit, NCCL on CUDA and gloo on CPU, and its members' waits for each other.

The group does not come from torch's default group: policy and engine each have a default group already.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from megatron_grpo.platform.device import connect_store, environment

# Seconds to connect to a store, less than `refit_calls.SETTLE_S`. A store listens before its address is sent: one that
# does not answer was closed, because another member of the attempt has failed.
CONNECT_STORE_S = 10.0

# Key in the store for the first failure of any member, in words: who failed, and why.
FAILURE = "failure"

# Seconds between a waiting member's checks for a failure: with 1,500 members the store serves 3,000 reads a second.
FAILURE_CHECK_S = 0.5

# Shortest and longest pause between two polls of a transfer, in seconds.
_POLL_S = 20e-6, 5e-3

NET_CHANNELS = 4  # about 14 GB/s each, so that a link fills a network of 50 GB/s
NCCL_MAGIC = 0xCAFEBEEF  # of an initialised `ncclConfig_t`

# Threads that wait for transfers of gloo: two buffers have up to four pending transfers, and four are to spare.
_GLOO_WAITS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the store where a group's members meet."""

    host: str
    port: int
    receivers: int  # number of workers of all engines
    timeout_s: float  # limit of making the group, and of each use of it
    devices_per_node: int | None = None
    """Devices of a node on which both sides compute, rank n of each on the same one; None: they have their own."""

    def connect(self) -> Store:
        """Connect to the store; RuntimeError: none listens there within CONNECT_STORE_S."""
        store = connect_store(self.host, self.port, min(self.timeout_s, CONNECT_STORE_S))
        store.set_timeout(timedelta(seconds=self.timeout_s))  # for keys that other members write
        return store


class Transfer(Protocol):
    """A pending message, like torch's `Work`."""

    def is_completed(self) -> bool:
        """True once the transfer has ended, by success or failure; does not wait."""

    def wait(self) -> object:
        """Order the device's stream behind the ended transfer; RuntimeError: it failed."""


class TransferGroup(Protocol):
    """The part of torch's process group that a refit uses."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer: ...
    def abort(self) -> None:
        """End all pending transfers of this process; peers may notice nothing."""


class Watch:
    """Waits for other members until a deadline or any failure.

    `store` is a client of the rendezvous' store that no other thread uses. The deadline is `timeout_s` after `restart`.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self.restart()

    def restart(self) -> None:
        self._end = time.monotonic() + self._timeout_s

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Return once `is_over()` is true; RuntimeError: deadline, or another failed."""
        # NCCL does not report that a process is gone: a transfer to it stays pending, and so does every transfer that
        # waits for that one, until each member's timeout. So members do not wait inside of the library. They poll, and
        # now and then look for FAILURE in the store, which is written by the first member that fails or by the driver,
        # which learns from Ray that a process is gone.
        began = last_check = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if now >= self._end:
                raise RuntimeError(f"nothing happened until the deadline of {self._timeout_s:g} s")
            if now - last_check >= FAILURE_CHECK_S:
                last_check = now
                if self._store.check([FAILURE]):
                    raise RuntimeError(f"given up, because {self._store.get(FAILURE).decode()}")
            shortest, longest = _POLL_S
            time.sleep(min(max((now - began) / 10, shortest), longest))  # adds a tenth to a wait, at most

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function in a thread, abandoned if the wait fails."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is read
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        self.wait_until(answer.done)
        return answer.result()

    def report_failure(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the driver has closed the store, so it has given up already
            record_failure(self._store, reason)


def list_members(rendezvous: Rendezvous, sources: int, node: int | None) -> tuple[range, range]:
    """List the ranks of policy and engines in a group.

    `node`: only those of this node; None: all.
    """
    members = range(sources), range(rendezvous.receivers)
    if node is None:
        return members
    assert rendezvous.devices_per_node is not None, "sides with devices of their own are not matched by node"
    begin = node * rendezvous.devices_per_node
    part = slice(begin, begin + rendezvous.devices_per_node)
    return members[0][part], members[1][part]


def record_failure(store: Store, reason: str) -> None:
    """Record the first failure for all waiting members."""
    store.compare_set(FAILURE, "", reason)


def join_group(
    rendezvous: Rendezvous, rank: int, size: int, device: torch.device, name: str = "group"
) -> TransferGroup:
    """Join a group of a refit; blocks until `size` members have joined."""
    if device.type == "cuda":
        return _make_nccl_group(PrefixStore(name, rendezvous.connect()), rank, size, device)
    return GlooGroup(make_gloo_group(rendezvous, name, rank, size), (rank + 1) % size)


class NcclConfig(ctypes.Structure):
    """NCCL's `ncclConfig_t` (nccl.h, from 2.28 on), as far as the fields used here."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("splitShare", "trafficClass")),
        ("commName", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs")),
        ("nChannelsPerNetPeer", ctypes.c_int),
    )


def set_net_channels(config: Any) -> None:
    """Give each pair of ranks on different machines NET_CHANNELS channels, if NCCL can.

    NCCL takes fewer the more ranks there are, one from 128 on. `config`: torch's NCCLConfig, which lacks the field.
    """
    if not hasattr(config, "unsafe_get_ptr"):  # torch before 2.13
        return
    fields = NcclConfig.from_address(config.unsafe_get_ptr())
    if fields.magic == NCCL_MAGIC and fields.size >= ctypes.sizeof(NcclConfig):
        fields.nChannelsPerNetPeer = NET_CHANNELS


def _make_nccl_group(store: Store, rank: int, size: int, device: torch.device) -> TransferGroup:
    # Torch would make a communicator for each pair of ranks that exchanges a message: dozens for each rank of a large
    # model, each with its own buffers, and each made inside of a send that blocks the host. So one communicator of all
    # ranks is made beforehand. All transfers of a process then go one after the other through one stream, which is safe
    # in the order of `schedule_messages`.
    from torch.distributed import ProcessGroupNCCL

    settings = {
        "TORCH_NCCL_BLOCKING_WAIT": "1",  # an error is raised by wait(), instead of ending the process from a thread
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # that transfers go one after the other
    }
    options = ProcessGroupNCCL.Options()
    set_net_channels(options.config)
    with environment(**settings):
        group: Any = ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return cast(TransferGroup, group)


def make_gloo_group(rendezvous: Rendezvous, name: str, rank: int, size: int) -> Any:
    """Make torch's gloo group at the address that reaches the rendezvous."""
    group_class: Any = ProcessGroupGloo  # torch's stubs lack the constructor that takes a device
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, 9))  # sends nothing
        address = probe.getsockname()[0]  # gloo would choose the host name, which may not resolve
    options = group_class._Options()
    options._devices = [group_class.create_device(hostname=address)]
    options._timeout = timedelta(seconds=rendezvous.timeout_s)
    return group_class(PrefixStore(name, rendezvous.connect()), rank, size, options)


class _ThreadTransfer:
    """A transfer of gloo, polled through a thread that waits for it."""

    def __init__(self, wait: Future[Any]) -> None:
        self.is_completed, self.wait = wait.done, wait.result


class GlooGroup:
    """A gloo group that can be polled and aborted."""

    def __init__(self, group: Any, neighbour: int) -> None:
        self._group, self._neighbour = group, neighbour
        self._waits = ThreadPoolExecutor(_GLOO_WAITS)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        return _ThreadTransfer(self._waits.submit(self._group.send(tensors, peer, tag).wait))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        return _ThreadTransfer(self._waits.submit(self._group.recv(tensors, peer, tag).wait))

    def abort(self) -> None:
        """End all pending transfers: after a timeout gloo closes the group's connections."""
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._neighbour, 1).wait(timedelta(milliseconds=1))
        self._waits.shutdown(wait=False)
