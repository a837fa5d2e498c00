"""The remote methods of an engine's actor and of vLLM's workers, without the imports of the classes that have them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationRequest, SamplingSettings
from megatron_grpo.config.generation_schema import RefitMode

if TYPE_CHECKING:
    from megatron_grpo.generation.engine_canary import CanaryPrompt
    from megatron_grpo.generation.shutdown import EngineProcesses


class Engine(Protocol):
    """Ray actor that samples: `VllmEngine`, or `ServerEngine` for an external server."""

    async def start(self) -> tuple[dict[str, float], EngineProcesses, dict[str, Any]]:
        """Make the engine ready to sample with the weights of the model folder.

        Returns:
            Seconds by part; the engine's processes, which the driver ends if this actor no longer can; and the settings
            with which it computes (`settings_in_use`), empty for a server, which does not tell them.
        """
        ...

    def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        """Sample all requests, and yield responses as they become complete; called as a streaming generator of Ray.

        Args:
            requests: prompt and seed of each response to sample.
            settings: temperature, filters and stop conditions of all requests.
            call: name of this call among those in flight, for `abort`.

        Yields:
            Pickled list[tuple[int, GenerationOutput | str]]: numbers of requests, each with its response, or with the
            reason why there is none.

        Raises:
            EngineLostError: a process of the engine has ended.
            RuntimeError: the engine cannot sample; the message says why.
        """
        ...

    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop sampling some requests of a call in flight; each is answered with the reason."""
        ...

    def take_counts(self) -> EngineCounts:
        """Take the counts of the engine's work since the last call."""
        ...

    async def connect_weights(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> None:
        """Connect every worker to the senders of the weights.

        Args:
            mode: transport of the weights.
            rendezvous: fields of weight_sync.groups.Rendezvous; with files, `folder` and `session`.
            first_receiver: total number of workers of the engines before this one.
        """
        ...

    async def receive_weights(self, version: int) -> None:
        """Receive one version in every worker; until it is committed, the engine does not sample."""
        ...

    async def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        """Serve the received weights as this version, or if it `awaits_canary` only after `check_canary`."""
        ...

    async def check_canary(self, prompt: CanaryPrompt) -> float:
        """Serve the committed weights if the engine's log-probabilities of the canary agree with the policy's.

        Returns:
            Median difference of the log-probabilities in the worst sequence, in nats.

        Raises:
            CanaryError: the log-probabilities differ; the engine does not serve.
        """
        ...

    async def fingerprint_weights(self) -> list[dict[str, list[float]]]:
        """Fingerprints of every worker's weights (`weight_sync.fingerprints.engine_fingerprints`), by worker."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...


class EngineWorker(Protocol):
    """The methods of `weight_sync.engine_worker.RefitWorker` that an engine calls in each of vLLM's workers.

    They return the text of an error and never raise.
    """

    def connect_refit(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> str | None:
        """Connect to the policy."""
        ...

    def receive_refit(self, version: int) -> str | None:
        """Receive one version, and load it into the model."""
        ...

    def confirm_refit(self, version: int) -> str | None:
        """Check that this worker holds a version."""
        ...

    def fingerprint_weights(self) -> dict[str, list[float]] | str:
        """Fingerprints of this worker's weights as its kernels hold them."""
        ...

    def describe(self) -> dict[str, Any]:
        """The server's properties that a run checks, in JSON types; {"problem": ...} if it cannot be used."""
        ...
