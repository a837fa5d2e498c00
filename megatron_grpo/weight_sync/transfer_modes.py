"""Runs on the driver: the ways in which weights travel from the policy to engines (`refit.mode`)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from torch.distributed import Store

from megatron_grpo.cluster.ray_cluster import find_node_address
from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.families import build_model_map
from megatron_grpo.models.weight_layouts import split_engine, split_policy
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.groups import Rendezvous
from megatron_grpo.weight_sync.refit_calls import RefitCalls
from megatron_grpo.weight_sync.shard_sender import connect_shards, send_shards
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_pieces, schedule_messages, write_plan


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The figures of one completed refit."""

    version: int
    bytes_sent: int
    """Bytes of all messages, padding and checksums included; with files, bytes of the tensors written."""
    tensors: int
    """Number of slices in all messages; with files, of whole tensors written."""
    buckets: int
    """Number of messages, or of files."""
    seconds: float = 0.0  # of all attempts together
    retries: int = 0
    replaced: tuple[str, ...] = ()
    """Each engine that was replaced since the previous refit, with the reason."""
    checks: Mapping[str, float] = field(default_factory=dict)
    """Figures of the canary and of the comparison of weights, if they were due."""


class TransferMode(ABC):
    """One way to bring weights from the policy into engines."""

    def __init__(self, calls: RefitCalls, config: RefitConfig) -> None:
        self.calls, self.config = calls, config
        self.bucket_bytes = int(config.bucket_mib * 2**20)

    @abstractmethod
    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        """Connect the policy and these engines, and no others; AttemptError: that failed.

        `anew`: it is the first time or an attempt has failed, so no earlier connection may be used.
        """

    @abstractmethod
    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        """Bring one version into connected engines, which verify it until the deadline (monotonic).

        `on_sent` is called as soon as calls of ranks run only after they have sent.

        Raises:
            AttemptError: a process failed, a checksum differed, or the deadline passed.
        """

    def close(self) -> None:  # noqa: B027 - most modes keep nothing
        """Delete files that the mode has written; idempotent."""

    def connect_engines(
        self, engines: tuple[int, ...], mode: RefitMode, source: dict[str, Any]
    ) -> dict[int, ray.ObjectRef]:
        """Begin to connect engines to a source: the address of the weights, in types of JSON."""
        ranks = self.calls.generation.config.parallel.ranks_per_engine
        source = {**source, "model_map": build_model_map(self.calls.policy.settings.shape).to_json()}
        calls: dict[int, ray.ObjectRef] = {}
        for index, engine in enumerate(engines):
            calls |= self.calls.call_engines([engine], Engine.connect_weights, mode, source, index * ranks)
        return calls


class LinkMode(TransferMode):
    """Messages over links between ranks and workers (reshard, broadcast).

    With reshard every engine rank receives the slices that it keeps. With broadcast it receives whole tensors and takes
    its shard with vLLM's own loaders, whatever the two layouts are.
    """

    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        generation, timeout_s = self.calls.generation.config, self.config.timeout_s
        receivers = generation.parallel.ranks_per_engine * len(engines)
        store = self.calls.store = open_store(find_node_address(), timeout_s)
        rendezvous = Rendezvous(store.host, store.port, receivers, timeout_s, same_gpus=generation.is_colocated)
        self._write_plan(store, receivers)
        sends = self.calls.policy.submit(connect_shards, rendezvous)
        receives = self.connect_engines(engines, self.config.mode, {"rendezvous": asdict(rendezvous)})
        self.calls.wait(sends, receives, time.monotonic() + timeout_s, "connecting the refit")

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        receives = self.calls.call_engines(engines, Engine.receive_weights, version)
        sends = self.calls.policy.submit(send_shards, version)
        on_sent()
        counts = self.calls.wait(sends, receives, deadline, f"refit of version {version}")[: len(sends)]
        nbytes, tensors, messages = map(sum, zip(*counts, strict=True))
        return TransferReport(version, nbytes, tensors, messages)

    def _write_plan(self, store: Store, receivers: int) -> None:
        settings, generation, config = self.calls.policy.settings, self.calls.generation.config, self.config
        shape = settings.shape
        sources, engine = split_policy(settings.config.parallel, shape), split_engine(generation.parallel, shape)
        if config.mode == "broadcast":
            engine = split_policy(ParallelConfig(), shape)  # one rank that keeps the full model
        dtypes = choose_wire_dtypes(shape, settings.config.precision, config.fp8_blocks)
        engines, limit = receivers // len(engine), self.bucket_bytes // 2
        pieces = plan_pieces(shape, sources, engine, engines, dtypes, limit, same_devices=generation.is_colocated)
        scheduled = schedule_messages(pieces, self.bucket_bytes)
        write_plan(store, scheduled, len(sources), receivers, dtypes, config.shared_memory)
