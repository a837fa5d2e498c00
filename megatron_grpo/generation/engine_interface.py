"""Remote methods of engines and of vLLM's workers, without the imports of their classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationRequest, SamplingSettings
from megatron_grpo.config.generation_schema import RefitMode

if TYPE_CHECKING:
    from megatron_grpo.cluster.actor_processes import ActorProcesses
    from megatron_grpo.generation.engine_canary import CanaryPrompt, CanaryResult

TensorShapes = Mapping[str, Sequence[int]]
"""Shapes of a model's Hugging Face tensors by name, in the order of export."""


class LoaderTrace(TypedDict):
    """A worker's trace of vLLM's loaders (`RefitWorker.trace_weights`)."""

    digest: str
    boxes: str
    """Packed boxes; empty: they were not asked for."""
    converts: bool
    """Whether a layer on a GPU has plain weights only during a refit."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The report of an engine's actor once it can sample."""

    seconds: dict[str, float]  # duration of each part of the start
    processes: ActorProcesses  # for the driver to end if the actor no longer can
    settings: dict[str, Any]
    """Settings in JSON types (`vllm_requests.describe_settings`); empty for a server, which does not show them."""


class Engine(Protocol):
    """Ray actor that samples: `VllmEngine` or `ServerEngine`."""

    async def start(self) -> EngineStart:
        """Start with the weights of the model folder."""

    def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        """Sample all requests, and yield responses as they become complete.

        It is called as a streaming generator of Ray. `call` is a name for `abort`, unique among calls in flight. Yields
        pickled list[tuple[int, GenerationOutput | str]]: indices of requests, each with its response or the reason why
        there is none. Raises EngineLostError if a process of the engine has ended, and RuntimeError with the reason if
        the engine cannot sample.
        """

    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop some requests of a call; each gets the reason as its answer."""

    def take_counts(self) -> EngineCounts:
        """Return the counts of the work since the last call."""

    async def trace_weights(self, mode: RefitMode, tensors: TensorShapes, needs_boxes: bool) -> list[LoaderTrace]:
        """Trace the loaders of every worker."""

    async def connect_weights(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> None:
        """Connect every worker to the senders of the weights.

        `source` has `tensors`, `boxes` and `rendezvous`; with files, `folder` and `session` in its place.
        `first_receiver` is the total number of workers of the engines before this one.
        """

    async def receive_weights(self, version: int) -> None:
        """Receive a version; requests are refused or wait until its commit."""

    async def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        """Commit weights that every worker confirms; served now, or after `check_canary`."""

    async def check_canary(self, prompt: CanaryPrompt) -> CanaryResult:
        """Compare the canary; if it agrees, serve the committed weights.

        Returns and raises as `CanaryPrompt.require_agreement`; NaN: vLLM could not compute the canary, so nothing was
        compared.
        """

    async def fingerprint_weights(self) -> list[dict[str, list[float]]]: ...

    def shutdown(self) -> None: ...


class EngineWorker(Protocol):
    """Our methods of vLLM's workers (`weight_sync.engine_worker.RefitWorker`).

    They return the text of an error and never raise.
    """

    def trace_weights(self, mode: RefitMode, tensors: TensorShapes, needs_boxes: bool) -> LoaderTrace | str: ...

    def connect_refit(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> str | None: ...

    def receive_refit(self, version: int) -> str | None: ...

    def keep_unsent(self) -> str | None: ...

    def confirm_refit(self, version: int) -> str | None: ...

    def fingerprint_weights(self) -> dict[str, list[float]] | str: ...

    def describe(self) -> dict[str, Any]:
        """Describe an external server, for its checks; {"problem": ...}: it is unfit."""
