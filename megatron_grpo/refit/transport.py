"""The driver's half of a refit: both sides are told at once, and waited for together until a deadline."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from dataclasses import asdict, replace
from typing import Any, ClassVar

import ray
from torch.distributed import Store, TCPStore

from megatron_grpo.cluster.futures import gather
from megatron_grpo.cluster.rendezvous import node_address, open_store
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.refit.groups import Rendezvous
from megatron_grpo.refit.interface import RefitError, TransferReport, WeightTransport

logger = logging.getLogger(__name__)


class GroupTransport(WeightTransport):
    """Transfers over process groups that ranks of the policy and generation workers are members of."""

    mode: ClassVar[RefitMode]

    def __init__(self, policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig) -> None:
        self._policy = policy
        self._generation = generation
        self._config = config
        self._timeout_s, self._retries = config.timeout_s, config.retries
        self._bucket_bytes = int(config.bucket_mib * 2**20)
        self._store: TCPStore | None = None
        self._links_failed = False

    @abstractmethod
    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        """Write what receivers have to know into the store, and let every rank of the policy join its groups."""

    @abstractmethod
    def _send(self, version: int) -> list[ray.ObjectRef]:
        """Let every rank of the policy send: of each what it sent, or None."""

    def connect(self) -> None:
        endpoints = self._generation.endpoints()
        self._store = open_store(node_address(), self._timeout_s)
        rendezvous = Rendezvous(
            host=self._store.host,
            port=self._store.port,
            receivers=sum(endpoint.ranks for endpoint in endpoints),
            timeout_s=self._timeout_s,
            same_gpus=self._generation.colocated,
        )
        sends = self._connect_senders(self._store, rendezvous)
        first = [sum(e.ranks for e in endpoints[:index]) for index in range(len(endpoints))]
        arguments = [(self.mode, asdict(rendezvous), offset) for offset in first]
        receives = self._generation.submit_each("connect_weights", arguments)
        self._complete(sends, receives, time.monotonic() + self._timeout_s, "connecting the refit")
        self._links_failed = False

    def publish(self, version: int) -> TransferReport:
        began = time.monotonic()
        failures: list[str] = []
        while len(failures) <= self._retries:
            try:
                if self._links_failed:  # half a message may be left in one
                    self.connect()
                report = self._attempt(version)
                return replace(report, seconds=time.monotonic() - began, retries=len(failures))
            except RefitError as error:
                self._links_failed = True
                logger.warning("attempt %d: %s", len(failures) + 1, error)
                failures.append(str(error))
        raise RefitError("; tried again: ".join(failures))

    def _attempt(self, version: int) -> TransferReport:
        deadline = time.monotonic() + self._timeout_s
        what = f"refit of version {version}"
        receives = self._generation.submit("receive_weights", version)
        sends = self._send(version)
        sent = [one for one in self._complete(sends, receives, deadline, what) if one is not None]
        self._complete([], self._generation.submit("commit_weights", version), deadline, f"commit of version {version}")
        return TransferReport(
            version=version,
            bytes_sent=sum(one.bytes for one in sent),
            tensors=sum(one.tensors for one in sent),
            buckets=sum(one.buckets for one in sent),
            seconds=0.0,
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
