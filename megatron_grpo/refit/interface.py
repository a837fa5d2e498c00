"""How one version of the policy's weights reaches every generation worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megatron_grpo.config.errors import RunError


class RefitError(RunError):
    """A refit that did not complete on every worker; generation must not be used with the new version."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One completed refit."""

    version: int
    bytes_sent: int
    """Payload, counted once however many workers received it."""
    tensors: int
    buckets: int
    seconds: float


class WeightTransport(ABC):
    """Moves the policy's weights into generation."""

    @abstractmethod
    def connect(self) -> None:
        """Open the channels between policy and generation ranks; once, before the first publish."""

    @abstractmethod
    def publish(self, version: int) -> TransferReport:
        """Send the policy's current weights to every generation worker and commit them there as `version`.

        Raises:
            RefitError: the deadline passed, a rank died or a checksum differed; the message names who.
        """
