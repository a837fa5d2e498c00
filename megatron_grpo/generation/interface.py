"""What the rest of the system knows of generation: actors that sample, and how many ranks each has to be refitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.data.engine_counts import EngineCounts
from megatron_grpo.data.packed import Packed
from megatron_grpo.data.responses import GenerationRequest, SamplingSettings
from megatron_grpo.generation.vllm_ending import EngineProcesses


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine as the refit sees it."""

    index: int
    ranks: int
    """Worker processes: tensor * pipeline."""


class EngineInterface(ABC):
    """A Ray actor that samples: an engine of the run's own, or what stands for a server that runs elsewhere."""

    @abstractmethod
    async def start(self) -> dict[str, float]:
        """Return when it can be refitted; seconds by part of the start."""

    @abstractmethod
    def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Packed]:
        """Sample all requests, and yield responses as they are complete; a streaming generator of Ray.

        Args:
            requests: the responses to sample, each with its prompt and seed.
            settings: temperature, filters and stop conditions of all requests.
            call: name of this call among those in flight, for `abort`.

        Yields:
            Some responses, as a list[tuple[int, GenerationOutput | str]] when it arrives: each with the number of its
            request, and instead of a response the reason why there is none.

        Raises:
            RuntimeError: the engine cannot sample; the message says why.
        """

    @abstractmethod
    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop sampling these requests of a call in flight; they count as answered, with the reason."""

    @abstractmethod
    def processes(self) -> EngineProcesses:
        """The engine's processes, for whoever ends them when this one no longer can."""

    @abstractmethod
    def take_counts(self) -> EngineCounts:
        """What the engine had to do since the last call."""

    @abstractmethod
    async def connect_weights(self, mode: RefitMode, meeting: dict[str, Any], first_receiver: int) -> None:
        """Let every worker come to where weights will be handed over.

        Args:
            mode: how weights come.
            meeting: fields of refit.groups.Rendezvous, or of refit.files.receiver.SharedFolder, by name.
            first_receiver: number of workers that the engines before this one have together.
        """

    @abstractmethod
    async def receive_weights(self, version: int) -> None:
        """Take one version into every worker; nothing is sampled until it is committed.

        Raises:
            RuntimeError: some worker did not get it, or could not verify it.
        """

    @abstractmethod
    async def commit_weights(self, version: int) -> None:
        """Serve what was received, under this version."""

    @abstractmethod
    def shutdown(self) -> None:
        """End what the engine has started."""


class GenerationInterface(ABC):
    """A pool of inference engines that look like one."""

    @property
    @abstractmethod
    def engines(self) -> Sequence[Any]:
        """Ray actors with the methods of `EngineInterface`, in the order of their index."""

    @abstractmethod
    def endpoints(self) -> list[EngineEndpoint]:
        """The engines, in the order of their index."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every engine process; idempotent."""
