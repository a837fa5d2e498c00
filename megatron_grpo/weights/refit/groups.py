"""Runs on ranks of the policy and in engines' workers: process groups of a refit, NCCL on CUDA and gloo on CPU.

These groups do not come from torch's default group, since policy and engine each have a default group of their own.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from megatron_grpo.platform.device import environment, reach_store

REACH_S = 10.0
"""Seconds to reach a store, less than `transport.SETTLE_S`. A store listens before its address is sent, so a store that
cannot be reached was closed, because another member of the attempt has failed."""

P = ParamSpec("P")
Group = Any
"""A process group of torch's, whose stubs lack the methods that are used here."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the store through which the members of the groups find each other."""

    host: str
    port: int
    receivers: int
    """Number of workers of all engines."""
    timeout_s: float
    """Limit in seconds of joining a group, and of each transfer."""
    same_gpus: bool = False
    """Whether both sides compute on the same GPUs, where NCCL cannot be used: it allows one rank a GPU."""

    def store(self) -> Store:
        """A client of the store at this address.

        Raises:
            RuntimeError: no store listens at the address within REACH_S.
        """
        store = reach_store(self.host, self.port, min(self.timeout_s, REACH_S))
        store.set_timeout(timedelta(seconds=self.timeout_s))  # for others' keys
        return store


def join(rendezvous: Rendezvous, name: str, rank: int, size: int, device: torch.device) -> Group:
    """Join the group of this name; returns when all `size` members have joined.

    Raises:
        RuntimeError: a member did not join within the timeout.
    """
    store, timeout = PrefixStore(f"refit/{name}", rendezvous.store()), timedelta(seconds=rendezvous.timeout_s)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        with environment(TORCH_NCCL_BLOCKING_WAIT="1"):  # wait() raises at the timeout; the default ends the process
            return ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the constructor that takes a device
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, 9))  # sends nothing
        own_address = probe.getsockname()[0]  # gloo would choose the host name, which may not resolve
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def leaves_on_failure(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Decorate a method: when it fails, its object leaves its group (`close`), so that the other members fail at once.

    A group lives as long as any reference to it or to a pending transfer, and the traceback of an error keeps the local
    variables of all functions it has passed; so these are cleared.
    """

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except BaseException as error:
            passed: BaseException | None = error
            while passed is not None:
                traceback.clear_frames(passed.__traceback__)  # frames of functions that have returned
                passed = passed.__cause__ or passed.__context__
            self.close()
            raise

    return call
