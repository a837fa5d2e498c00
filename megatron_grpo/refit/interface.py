"""How one version of the policy's weights reaches every generation worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError


class RefitError(RunError):
    """A refit that did not complete on every worker; generation must not be used with the new version."""


class PolicyLostError(RefitError, ModelLostError):
    """A refit failed because a rank of the policy is gone or hangs."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank of the policy put on its way."""

    bytes: int
    """With padding and seals."""
    tensors: int
    """Whole ones, or slices of them."""
    buckets: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One completed refit."""

    version: int
    bytes_sent: int
    """Payload, counted once however many workers received it from one sender."""
    tensors: int
    buckets: int
    seconds: float
    """Of all attempts."""
    retries: int = 0
    """Attempts that failed before."""
    replaced: tuple[str, ...] = ()
    """Of every engine that was replaced since the refit before this one, in this one or between: which, and why."""


class WeightTransport(ABC):
    """Moves the policy's weights into generation."""

    @abstractmethod
    def connect(self) -> None:
        """Open the channels between policy and generation ranks; once, before the first publish."""

    @abstractmethod
    def publish(self, version: int) -> TransferReport:
        """Send the policy's current weights to every generation worker and commit them there as `version`.

        Raises:
            RefitError: in every attempt the deadline passed, a rank died or a checksum differed; names who.
            PolicyLostError: it was a rank of the policy.
        """

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Remove what the transport keeps outside of processes; idempotent."""

    def restore(self, lost: Mapping[int, str]) -> None:
        """Replace engines that were lost while nothing was published, and give the new ones the current weights.

        Args:
            lost: why each is lost, by its number.

        Raises:
            SamplingError: they are not replaced, for the reason that is given.
            PolicyLostError: a rank of the policy is gone, too.
        """
        raise SamplingError("; ".join(lost.values()))


class Receiver(Protocol):
    """A generation worker's end of a connected refit."""

    def begin(self) -> None:
        """Prepare the model to be given new weights."""

    def receive(self, version: int) -> None:
        """Take one version of the weights.

        Raises:
            ValueError: what came is not what was sent, or of another version.
            RuntimeError: somebody stopped sending.
        """

    def finish(self) -> None:
        """Let the model compute with what it was given."""

    def abandon(self) -> None:
        """Leave the model so that a later refit can begin; what it holds until then is of no version."""
