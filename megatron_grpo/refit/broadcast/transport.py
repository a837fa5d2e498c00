"""The transport behind `refit`: a broadcast group per pipeline stage of the policy, all generation workers in each."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Protocol

import ray
from torch.distributed import TCPStore

from megatron_grpo.cluster.futures import gather
from megatron_grpo.cluster.rendezvous import node_address, open_store
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.refit.broadcast.channel import Rendezvous
from megatron_grpo.refit.broadcast.sender import connect_sender, send_weights
from megatron_grpo.refit.interface import RefitError, TransferReport, WeightTransport


class PolicyRanks(Protocol):
    """What the transport needs of the policy."""

    def submit(self, fn: Any, *args: Any) -> list[ray.ObjectRef]:
        """Run fn(rank's model, *args) on every rank, ranks in order."""


class BroadcastTransport(WeightTransport):
    """NCCL on CUDA, gloo on CPU. Every worker gets whole tensors and keeps its shard, whatever the two layouts are."""

    def __init__(self, policy: PolicyRanks, generation: VllmGeneration, config: RefitConfig) -> None:
        self._policy = policy
        self._generation = generation
        self._timeout_s = config.timeout_s
        self._bucket_bytes = int(config.bucket_mib * 2**20)
        self._store: TCPStore | None = None

    def connect(self) -> None:
        endpoints = self._generation.endpoints()
        self._store = open_store(node_address(), self._timeout_s)
        rendezvous = Rendezvous(
            host=self._store.host,
            port=self._store.port,
            receivers=sum(endpoint.ranks for endpoint in endpoints),
            timeout_s=self._timeout_s,
        )
        sends = self._policy.submit(connect_sender, rendezvous, self._bucket_bytes)
        first = [sum(e.ranks for e in endpoints[:index]) for index in range(len(endpoints))]
        receives = self._generation.submit_each("connect_weights", [(asdict(rendezvous), offset) for offset in first])
        self._complete(sends, receives, time.monotonic() + self._timeout_s, "connecting the refit")

    def publish(self, version: int) -> TransferReport:
        began = time.monotonic()
        deadline = began + self._timeout_s
        what = f"refit of version {version}"
        receives = self._generation.submit("receive_weights", version)
        sends = self._policy.submit(send_weights, version, self._bucket_bytes)
        sent = [one for one in self._complete(sends, receives, deadline, what) if one is not None]
        self._complete([], self._generation.submit("commit_weights", version), deadline, f"commit of version {version}")
        return TransferReport(
            version=version,
            bytes_sent=sum(one.bytes for one in sent),
            tensors=sum(one.tensors for one in sent),
            buckets=sum(one.buckets for one in sent),
            seconds=time.monotonic() - began,
        )

    def _complete(
        self, sends: list[ray.ObjectRef], receives: list[ray.ObjectRef], deadline: float, what: str
    ) -> list[Any]:
        """Wait for both sides; what the senders returned.

        Raises:
            RefitError: one side failed, which is told at once, without waiting for the other; or the deadline passed.
        """
        names = [f"policy rank {rank}" for rank in range(len(sends))]
        names += [f"generation engine {engine}" for engine in range(len(receives))]
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return gather([*sends, *receives], deadline_s=left, what=what, name=names.__getitem__)[: len(sends)]
        except RunError as error:
            raise RefitError(str(error)) from error
