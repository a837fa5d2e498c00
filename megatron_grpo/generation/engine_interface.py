"""Remote methods of engines and of vLLM's workers, without the imports of their classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationRequest, SamplingSettings
from megatron_grpo.config.generation_schema import RefitMode

if TYPE_CHECKING:
    from megatron_grpo.generation.engine_canary import CanaryPrompt
    from megatron_grpo.generation.engine_processes import EngineProcesses


@dataclass(frozen=True, slots=True)
class EngineStart:
    """What an engine's actor reports once it is up."""

    seconds: dict[str, float]  # that the start took, by part
    processes: EngineProcesses  # which the driver ends if the actor no longer can
    settings: dict[str, Any]
    """Settings with which it computes, in JSON types (`describe_settings`); empty for a server, which hides them."""


class Engine(Protocol):
    """Ray actor that samples: `VllmEngine` or `ServerEngine`."""

    async def start(self) -> EngineStart:
        """Start with the weights of the model folder."""

    def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        """Sample all requests, and yield responses as they become complete.

        It is called as a streaming generator of Ray, with a name among the calls in flight, for `abort`. Yields pickled
        list[tuple[int, GenerationOutput | str]]: numbers of requests, each with its response, or with the reason why
        there is none. Raises EngineLostError if a process of the engine has ended, and RuntimeError with the reason if
        the engine cannot sample.
        """

    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop some requests of a call; each gets the reason as its answer."""

    def take_counts(self) -> EngineCounts:
        """Return the counts of the work since the last call."""

    async def connect_weights(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> None:
        """Connect every worker to the senders of the weights.

        `source` is the weight map, and `rendezvous`; with files, `folder` and `session`. `first_receiver` is the total
        number of workers of the engines before this one.
        """

    async def receive_weights(self, version: int) -> None:
        """Receive a version; requests are refused or wait until its commit."""

    async def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        """Serve the weights if every worker confirms them, or only after `check_canary`."""

    async def check_canary(self, prompt: CanaryPrompt) -> float:
        """Serve the committed weights if `CanaryPrompt.require_agreement` does not raise; returns the same."""

    async def fingerprint_weights(self) -> list[dict[str, list[float]]]: ...

    def shutdown(self) -> None: ...


class EngineWorker(Protocol):
    """Methods that a refit adds to vLLM's workers (`weight_sync.engine_worker.RefitWorker`).

    They return the text of an error and never raise.
    """

    def connect_refit(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> str | None: ...

    def receive_refit(self, version: int) -> str | None: ...

    def confirm_refit(self, version: int) -> str | None: ...

    def fingerprint_weights(self) -> dict[str, list[float]] | str: ...

    def describe(self) -> dict[str, Any]:
        """Describe an external server, for its checks; {"problem": ...}: it is unfit."""
