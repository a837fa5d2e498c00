"""A policy and engines without models: each rank is a process with real links, and Ray is played by pipes.

For `WeightTransport`, whose plans, attempts, links and errors are real. What is sent is made up from turn and version.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import GenerationConfig, PolicyConfig
from megatron_grpo.generation.engine_interface import LoaderTrace
from megatron_grpo.models.families import build_weight_map, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.weight_sync.boxes import compute_digest, pack_boxes
from megatron_grpo.weight_sync.links import Links, Side
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_receiver import TargetLinks
from megatron_grpo.weight_sync.shard_sender import SourceLinks
from tests.support import nccl_like
from tests.support.engine_table import table_boxes
from tests.support.refit_faults import inject
from tests.support.refit_models import DENSE

SHAPE = parse_model_shape(DENSE)
ENTRIES = build_weight_map(SHAPE)
CPU = torch.device("cpu")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])
JOINING, GREETING = "before it joins", "before its first notice"


class PlayedRay:
    """The calls of Ray that a transport uses; references are futures."""

    @staticmethod
    def wait(refs: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """As `ray.wait`, for one or all."""
        over, _ = wait(refs, timeout, ALL_COMPLETED if num_returns == len(refs) else FIRST_COMPLETED)
        ready = [ref for ref in refs if ref in over][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    @staticmethod
    def get(refs: Future[Any] | Sequence[Future[Any]], timeout: float | None = None) -> Any:
        """As `ray.get`: raises as soon as one call has failed, beside calls that are not over."""
        futures = [refs] if isinstance(refs, Future) else list(refs)
        over, pending = wait(futures, timeout, FIRST_EXCEPTION)
        for ref in futures:
            if ref in over and ref.exception() is not None:
                ref.result()
        if pending:
            raise GetTimeoutError
        return refs.result() if isinstance(refs, Future) else [ref.result() for ref in futures]


class Actor:
    """A process around one object, whose methods run one after the other."""

    def __init__(self, kind: type[Any], *arguments: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._calls: list[Future[Any]] = []
        threading.Thread(target=self._answer, daemon=True).start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the object without waiting."""
        ref: Future[Any] = Future()
        self._calls.append(ref)
        try:
            self._pipe.send((method, arguments))
        except OSError:
            ref.set_exception(ActorDiedError())
        return ref

    def _answer(self) -> None:
        try:
            while True:
                result = self._pipe.recv()
                ref = self._calls.pop(0)
                if isinstance(result, Exception):
                    ref.set_exception(RayTaskError("call", "", result))
                else:
                    ref.set_result(result)
        except (EOFError, OSError):
            for ref in self._calls:
                ref.set_exception(ActorDiedError())


def _serve(pipe: Connection, kind: type[Any], arguments: tuple[Any, ...]) -> None:
    owner = kind(*arguments)
    while True:
        method, values = pipe.recv()
        try:
            result = getattr(owner, method)(*values)
        except Exception as error:  # noqa: BLE001 - raised where the answer is read
            result = RuntimeError(f"{error}")
        pipe.send(result)


class Member:
    """One rank of either side; `gpu`, its number among all, names its GPU in the group "gpus"."""

    def __init__(self, group: str, rank: int, gpu: int) -> None:
        if group == "nccl":
            nccl_like.install()
        self.rank, self._device = rank, CPU
        if group == "gpus":
            self._device = torch.device("cuda", gpu)
            torch.cuda.set_device(self._device)
        self.links: Any = None

    def end(self, moment: str, number: int) -> None:
        """Send this process a signal when it connects the next time."""
        open_links = Links._open_links

        def greet(*arguments: Any) -> None:
            os.kill(os.getpid(), number)
            open_links(*arguments)

        if moment == GREETING:
            Links._open_links = greet  # type: ignore[method-assign]
        else:
            self._connect = lambda *_: os.kill(os.getpid(), number)  # type: ignore[method-assign]

    def inject(self, moment: str, target: tuple[int, int] | None, fault: str | None) -> None:
        """`refit_faults.inject` on these links."""
        assert self.links is not None
        inject(self.links, moment, target, fault)

    def _connect(self, rendezvous: Rendezvous, side: Side, rank: int) -> None:
        self.links = None
        links = SourceLinks if side == "source" else TargetLinks
        self.links = links(rendezvous, rank, self._device, list(measure_tensors(SHAPE)))

    def _value(self, number: int, version: int) -> int:
        """Each byte of a message."""
        return (31 * version + int(self.links.messages[number]["turn"][0])) % 256


class Rank(Member):
    """A rank of the policy."""

    def connect_shards(self, rendezvous: Rendezvous) -> None:
        self._connect(rendezvous, "source", self.rank)

    def send_shards(self, version: int) -> tuple[int, int, int]:
        self.links.send(lambda number, buffer: buffer[:-16].fill_(self._value(number, version)), version)
        return sum(self.links.sizes), len(self.links.messages), len(self.links.messages)


class Worker(Member):
    """An engine of one rank."""

    received: int | None = None
    served: int | None = None

    def trace_weights(self, mode: str, tensors: dict[str, Any], needs_boxes: bool) -> list[LoaderTrace]:
        """As the engine's."""
        [boxes] = table_boxes(GenerationParallelConfig(), SHAPE)
        packed = pack_boxes(boxes)
        return [LoaderTrace(digest=compute_digest(packed), boxes=packed if needs_boxes else "", converts=False)]

    def connect_weights(self, mode: str, source: dict[str, Any], first: int) -> None:
        """As the engine's."""
        self._connect(Rendezvous(**source["rendezvous"]), "target", first)

    def receive_weights(self, version: int) -> None:
        """As the engine's."""
        self.received, links = None, self.links
        came: set[int] = set()

        def load(number: int, buffer: torch.Tensor) -> None:
            assert buffer[:-16].eq(self._value(number, version)).all(), f"message {number} has other bytes"
            came.add(number)

        links.receive(load, version)
        assert len(came) == len(links.messages)
        self.received = version

    def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        """As the engine's."""
        assert self.received == version
        self.served = version

    def serves(self) -> int | None:
        """The version that is served."""
        return self.served


@dataclass(frozen=True)
class Settings:
    """What a transport reads of a policy's settings."""

    config: PolicyConfig
    shape: ModelShape
    ranks_per_machine: int | None = None


class Policy:
    """In place of `MegatronPolicy`."""

    def __init__(self, group: str, parallel: ParallelConfig) -> None:
        self.settings = Settings(PolicyConfig(parallel=parallel, precision="float32"), SHAPE)
        self.actors = [Actor(Rank, group, rank, rank) for rank in range(parallel.world_size)]

    def submit(self, fn: Callable[..., Any], *arguments: Any) -> list[Future[Any]]:
        """Call the method of this function's name on every rank."""
        return [actor.call(fn.__name__, *arguments) for actor in self.actors]


class Generation:
    """In place of `VllmGeneration`."""

    def __init__(self, group: str, engines: int, ranks: int) -> None:
        self._group, self._ranks = group, ranks
        self.config = GenerationConfig(parallel=GenerationParallelConfig(data=engines))
        self.actors = [self.start(engine) for engine in range(engines)]
        self.restarts = [0] * engines

    def start(self, engine: int) -> Actor:
        """Start the process of an engine, which has no weights."""
        return Actor(Worker, self._group, engine, self._ranks + engine)

    def submit_to(self, engines: Sequence[int], method: Callable[..., Any], *arguments: Any) -> dict[int, Future[Any]]:
        """Call a method of these engines."""
        return {engine: self.actors[engine].call(method.__name__, *arguments) for engine in engines}

    def replace(self, losses: Mapping[int, str]) -> None:
        """Start new engines in place of lost ones."""
        for engine in losses:
            self.actors[engine].process.kill()
            self.actors[engine] = self.start(engine)
            self.restarts[engine] += 1
