"""Runs on the driver: the ways in which weights travel from the policy to engines (`refit.mode`)."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.process_log import ENGINE_NAME
from megatron_grpo.cluster.ray_cluster import find_node_address
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.adapter_names import make_policy_slot, measure_adapters
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.observability.run_files import write_atomically
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.adapters_alone import connect_adapters, plan_adapters, send_adapters
from megatron_grpo.weight_sync.boxes import Box, list_full_boxes, unpack_boxes
from megatron_grpo.weight_sync.file_writer import connect_folder, send_files
from megatron_grpo.weight_sync.pieces import Pieces
from megatron_grpo.weight_sync.refit_calls import AttemptError, RefitCalls
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_sender import connect_shards, send_shards
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages, write_plan
from megatron_grpo.weight_sync.weights_folder import MANIFEST, Manifest, WrittenTensor, compute_text_digest

# When the files have more than this many times the bytes of a version, the next version is written completely.
_MAX_STORED_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The figures of one completed refit."""

    version: int
    bytes_sent: int  # of all messages, padding and checksums included; with files, of the tensors written
    tensors: int  # slices in all messages; with files, whole tensors written
    buckets: int  # messages, or files
    seconds: float = 0.0  # of all attempts together
    retries: int = 0
    replaced: tuple[str, ...] = ()  # each engine that was replaced since the previous refit, with the reason
    checks: Mapping[str, float] = field(default_factory=dict)
    """Figures of the canary and of the comparison of weights, if they were due."""


class TransferMode(ABC):
    """One way to bring weights from the policy into engines."""

    def __init__(self, calls: RefitCalls, config: RefitConfig) -> None:
        self.calls, self.config = calls, config
        self.bucket_bytes = int(config.bucket_mib * 2**20)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's tensors by name."""
        return measure_tensors(self.calls.policy.settings.shape)

    @cached_property
    def sent_tensors(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the tensors that are sent, by name."""
        settings = self.calls.policy.settings
        alone = self.config.adapters == "alone"
        return measure_adapters(settings.shape, settings.config.lora) if alone else self.tensors

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

        `on_sent` is called once ranks will run any further call only after they have sent.

        Raises:
            AttemptError: a process failed, a checksum differed, or the deadline passed.
        """

    def close(self) -> None:  # noqa: B027 - most modes keep nothing
        """Delete files that the mode has written; idempotent."""

    def trace_engines(self, engines: tuple[int, ...]) -> None:
        """Let engines trace vLLM's loaders, unless an earlier connection has the boxes.

        A replaced engine has the same configuration, so it is given the boxes of the first ones.
        """
        if self.calls.engine_boxes:
            return
        calls: dict[int, ray.ObjectRef] = {}
        for index, engine in enumerate(engines):
            arguments = self.config.mode, self.tensors, index == 0
            calls |= self.calls.generation.submit_to([engine], Engine.trace_weights, *arguments)
        deadline = time.monotonic() + self.config.timeout_s
        answers = self.calls.wait([], calls, deadline, "tracing vLLM's loaders")
        digests = [[worker["digest"] for worker in workers] for workers in answers]
        for engine, engine_digests in zip(engines, digests, strict=True):
            if engine_digests != digests[0]:
                text = f"{ENGINE_NAME(engine)} loads weights in other places than {ENGINE_NAME(engines[0])}"
                raise AttemptError(f"{text}; engines need one version of vLLM and one configuration", {})
        self.calls.engine_boxes = [worker["boxes"] for worker in answers[0]]
        self.calls.engines_convert = any(worker["converts"] for worker in answers[0])

    def connect_engines(self, sends: list[ray.ObjectRef], engines: tuple[int, ...], source: dict[str, Any]) -> None:
        """Connect engines to a source, in types of JSON; wait for both sides."""
        mode, generation = self.config.mode, self.calls.generation
        ranks = generation.config.parallel.ranks_per_engine
        source = {**source, "tensors": self.sent_tensors, "boxes": self.calls.engine_boxes}
        if self.config.adapters == "alone":
            settings = self.calls.policy.settings
            source["adapter"] = asdict(make_policy_slot(settings.config, settings.shape))
        calls: dict[int, ray.ObjectRef] = {}
        for index, engine in enumerate(engines):
            calls |= generation.submit_to([engine], Engine.connect_weights, mode, source, index * ranks)
        self.calls.wait(sends, calls, time.monotonic() + self.config.timeout_s, "connecting the refit")


class LinkMode(TransferMode):
    """Messages over links between ranks and workers (reshard, broadcast).

    With reshard every engine rank receives the slices that it keeps. With broadcast it receives whole tensors and takes
    its shard with vLLM's own loaders, whatever the two layouts are.
    """

    connect_rank, send_rank = staticmethod(connect_shards), staticmethod(send_shards)
    """Functions of every rank of the policy."""

    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        self.trace_engines(engines)
        settings, generation, config = self.calls.policy.settings, self.calls.generation.config, self.config
        receivers = generation.parallel.ranks_per_engine * len(engines)
        try:
            scheduled, dtypes = self.plan(receivers)
        except ValueError as error:
            raise AttemptError(str(error), {}) from error
        try:
            store = self.calls.store = open_store(find_node_address(), config.timeout_s)
            world_size = settings.config.parallel.world_size
            write_plan(store, scheduled, world_size, receivers, dtypes, config.shared_memory)
        except (OSError, RuntimeError, RayError) as error:  # torch's errors of a store are RuntimeErrors
            reason = str(error).partition("\n")[0]  # torch adds a stack of calls in C++
            raise AttemptError(f"the store of the refit failed: {type(error).__name__}: {reason}", {}) from error
        rendezvous = Rendezvous(store.host, store.port, receivers, config.timeout_s, self.devices_per_node)
        sends = self.calls.policy.submit(self.connect_rank, rendezvous)
        self.connect_engines(sends, engines, {"rendezvous": asdict(rendezvous)})

    def plan(self, receivers: int) -> tuple[Pieces, list[str]]:
        """Plan messages; returns dtypes by row of the weight map too."""
        settings, engine_boxes = self.calls.policy.settings, self.engine_boxes
        if self.config.mode == "broadcast":  # planned as if each worker were an engine of one rank
            engine_boxes = [list_full_boxes(self.tensors)]
        dtypes = choose_wire_dtypes(settings.shape, settings.config.precision, self.config.fp8_blocks)
        scheduled = plan_messages(
            settings.shape,
            split_policy(settings.config.parallel, settings.shape),
            engine_boxes,
            receivers // len(engine_boxes),
            dtypes,
            self.bucket_bytes,
            devices_per_node=self.devices_per_node,
            by_layer=self.calls.engines_convert,
        )
        return scheduled, dtypes

    @property
    def engine_boxes(self) -> list[list[Box]]:
        """Traced boxes of an engine's workers."""
        return [unpack_boxes(text) for text in self.calls.engine_boxes]

    @property
    def devices_per_node(self) -> int | None:
        """Devices of a machine that ranks and engines share; None: they share none."""
        # Ranks on CPUs are all on one machine.
        settings = self.calls.policy.settings
        machine = settings.ranks_per_machine or settings.config.parallel.world_size
        return machine if self.calls.generation.config.is_colocated else None

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        receives = self.calls.generation.submit_to(engines, Engine.receive_weights, version)
        sends = self.calls.policy.submit(self.send_rank, version)
        on_sent()
        counts = self.calls.wait(sends, receives, deadline, f"refit of version {version}")[: len(sends)]
        nbytes, tensors, messages = map(sum, zip(*counts, strict=True))
        return TransferReport(version, nbytes, tensors, messages)


class AdapterMode(LinkMode):
    """Adapters alone over links; engines have read the base model themselves."""

    connect_rank, send_rank = staticmethod(connect_adapters), staticmethod(send_adapters)

    def plan(self, receivers: int) -> tuple[Pieces, list[str]]:
        settings, boxes = self.calls.policy.settings, self.engine_boxes
        shards, precision = split_policy(settings.config.parallel, settings.shape), settings.config.precision
        arguments = settings.shape, self.sent_tensors, shards, boxes, receivers // len(boxes), precision
        return plan_adapters(*arguments, self.bucket_bytes, devices_per_node=self.devices_per_node), [precision]


class FilesMode(TransferMode):
    """Weights in a folder that engines see: in `config.directory`, or in `run_dir`."""

    def __init__(self, calls: RefitCalls, config: RefitConfig, run_dir: Path) -> None:
        super().__init__(calls, config)
        run_dir = run_dir.absolute()
        if config.directory is None:
            self.folder = run_dir / "refit"
        else:  # each run has its own folder inside, since several runs may share refit.directory
            run = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
            self.folder = Path(config.directory).absolute() / f"{run_dir.name}-{run}"
        self.session = secrets.token_hex(8)
        self._writes = 0  # versions written
        self._rewrites = True  # the next version is written completely

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        self.trace_engines(engines)
        writers = []
        if anew:  # no engine reads the folder now
            with _disk_errors_as_attempts(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
                write_manifest(self.folder, Manifest(self.session, -1, {}))
            self._rewrites = True
            writers = self.calls.policy.submit(connect_folder, self.folder, self.bucket_bytes)
        self.connect_engines(writers, engines, {"folder": str(self.folder), "session": self.session})

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        self._writes += 1
        part = f"{self._writes:06d}"
        sends = self.calls.policy.submit(send_files, part, self._rewrites, self.config.adapters == "alone")
        stages = self.calls.wait(sends, {}, deadline, f"writing version {version}")
        tensors: dict[str, WrittenTensor] = {name: tensor for stage in stages for name, tensor in stage.items()}
        manifest = Manifest(self.session, version, tensors)
        with _disk_errors_as_attempts(self.folder):
            write_manifest(self.folder, manifest)
        on_sent()
        receives = self.calls.generation.submit_to(engines, Engine.receive_weights, version)
        self.calls.wait([], receives, deadline, f"refit of version {version}")
        with _disk_errors_as_attempts(self.folder):
            remove_unread(self.folder, manifest)
            stored_bytes = sum(file.stat().st_size for file in self.folder.glob("*/*"))
        self._rewrites = stored_bytes > _MAX_STORED_RATIO * sum(tensor.nbytes for tensor in tensors.values())
        changed = [tensor for tensor in tensors.values() if tensor.file.startswith(f"{part}/")]
        nbytes, files = sum(tensor.nbytes for tensor in changed), {tensor.file for tensor in changed}
        return TransferReport(version, nbytes, len(changed), len(files))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, by which the folder holds this version."""
    content = json.dumps(asdict(manifest))
    text = json.dumps({"digest": compute_text_digest(content), "content": content})
    write_atomically(folder / MANIFEST, lambda path: path.write_text(text))


def remove_unread(folder: Path, manifest: Manifest) -> None:
    """Delete the files that hold no tensor of this version."""
    read_files = {folder / tensor.file for tensor in manifest.tensors.values()}
    for file in folder.glob("*/*"):
        if file not in read_files:
            file.unlink()
    for part in folder.iterdir():
        if part.is_dir() and not any(part.iterdir()):
            part.rmdir()


@contextmanager
def _disk_errors_as_attempts(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AttemptError(f"the folder of the refit, {folder}, cannot be written: {error.strerror}", {}) from error
