"""Runs on the driver: brings one version of the policy's weights into every engine, with retries.

A version is verified before it is served. Engines stop serving before their first weight changes, every worker checks
the version and checksum of every buffer it receives, and the driver commits the version in a second call only after all
workers of all engines have confirmed it. So a worker that fails, a damaged buffer or an attempt cut off by its deadline
leaves engines that serve nothing, never engines that serve two versions or half of one; the next attempt starts over,
with new links, since half a message may be left in an old one. An attempt that costs an engine is not counted as a
retry: the engine is replaced and the others receive the version once more.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from torch.distributed import TCPStore

from megatron_grpo.cluster.futures import explain, gather, is_lost, listed, lost_among
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError
from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.sampler.engine_group import VllmGeneration
from megatron_grpo.sampler.engines import ENGINE_NAME
from megatron_grpo.trainer.group import MegatronPolicy
from megatron_grpo.weights.refit.groups import record_failure

logger = logging.getLogger(__name__)

SETTLE_S = 15.0
"""Seconds for the other calls to end once one has failed. Those that wait for a transfer end within `groups.LOOK_S`."""

RANK_NAME = "policy rank {}".format


class RefitError(RunError):
    """A refit did not complete on every worker, so no engine may serve the new version."""


class PolicyLostError(RefitError, ModelLostError):
    """A refit failed because a rank of the policy is gone or hangs."""


class AttemptError(Exception):
    """One attempt at a refit failed; `lost` says, by number, why engines are lost, which must be replaced first."""

    def __init__(self, text: str, lost: Mapping[int, str]) -> None:
        super().__init__(text)
        self.lost = lost


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
    seconds: float = 0.0
    """Seconds of all attempts together."""
    retries: int = 0
    """Number of failed attempts before this one."""
    replaced: tuple[str, ...] = ()
    """Each engine that was replaced since the previous refit, with the reason."""


class WeightTransport(ABC):
    """Moves the policy's weights into the engines, in attempts with a deadline, and handles failed ones.

    A mode of transfer defines `_connect` and `_attempt`.

    Args:
        policy: the model whose weights are sent.
        generation: the engines that receive them.
        config: deadline, retries and size of buckets.
    """

    mode: ClassVar[RefitMode]

    def __init__(self, policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig) -> None:
        self._policy = policy
        self._generation = generation
        self._config = config
        self._timeout_s, self._retries = config.timeout_s, config.retries
        self._bucket_bytes = int(config.bucket_mib * 2**20)
        self._linked: tuple[int, ...] = ()
        """Engines that the policy has links to; none after a failure."""
        self._version = 0
        self._replaced: list[str] = []
        self._store: TCPStore | None = None
        """Store of the current links: their plan, and the first failure, which ends the waits of all processes."""

    def connect(self) -> None:
        """Open the channels between policy and engines, before the first publish."""
        self._linked = ()
        try:
            self._connect(self._engines())
        except AttemptError as error:
            raise RefitError(str(error)) from None

    def publish(self, version: int) -> TransferReport:
        """Send the policy's current weights to every engine and commit them there as `version`.

        Raises:
            RefitError: in every attempt the deadline passed, a process died or a checksum differed; says which.
            PolicyLostError: a rank of the policy died or hangs.
        """
        began = time.monotonic()
        report = self._deliver(version, self._engines())
        self._version = version
        replaced, self._replaced = tuple(self._replaced), []
        return replace(report, seconds=time.monotonic() - began, replaced=replaced)

    def restore(self, lost: Mapping[int, str]) -> None:
        """Replace engines that were lost between refits, and send the published weights to the new ones only.

        Args:
            lost: why each engine is lost, by its number.

        Raises:
            SamplingError: the engines could not be replaced.
            PolicyLostError: a rank of the policy is gone, too.
        """
        try:
            self._replace(lost)
            self._deliver(self._version, tuple(sorted(lost)))
        except PolicyLostError:
            raise
        except RunError as error:
            raise SamplingError(str(error)) from error

    def close(self) -> None:  # noqa: B027 - most modes keep nothing
        """Delete files that the transport has written; idempotent."""

    def _engines(self) -> tuple[int, ...]:
        return tuple(range(self._generation.config.parallel.data))

    def _deliver(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        """Bring a version into engines; an attempt that costs an engine does not use up a retry."""
        failures: list[str] = []
        retries = self._retries
        while True:
            try:
                if self._linked != engines:
                    self._connect(engines)
                return replace(self._attempt(version, engines), retries=len(failures))
            except AttemptError as error:
                self._linked = ()
                logger.warning("attempt %d: %s", len(failures) + 1, error)
                failures.append(str(error))
                if error.lost:
                    self._replace(error.lost)
                elif retries:
                    retries -= 1
                else:
                    raise RefitError("; tried again: ".join(failures)) from None

    def _replace(self, lost: Mapping[int, str]) -> None:
        """Start new engines for lost ones.

        Raises:
            RefitError: the limit of replacements is reached, or a new engine does not start.
        """
        try:
            self._generation.replace(lost)
        except RunError as error:
            raise RefitError(str(error)) from error
        self._replaced += [f"{ENGINE_NAME(number)} was replaced: {reason}" for number, reason in lost.items()]

    @abstractmethod
    def _connect(self, engines: tuple[int, ...]) -> None:
        """Connect policy and engines, and record them in `_linked`; raises AttemptError."""

    @abstractmethod
    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        """Bring one version into linked engines and commit it there; raises AttemptError."""

    def _commit(self, version: int, engines: tuple[int, ...], deadline: float) -> None:
        """Let engines serve a version that all of them have verified."""
        commits = self._on_engines("commit_weights", version, engines)
        self._complete([], commits, deadline, f"commit of version {version}")

    def _on_engines(self, method: str, version: int, engines: Sequence[int]) -> dict[int, ray.ObjectRef]:
        return dict(zip(engines, self._generation.submit(method, version, engines=engines), strict=True))

    def _complete(
        self, sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], deadline: float, what: str
    ) -> list[Any]:
        """Wait for both sides; returns the results of the senders.

        Raises:
            AttemptError: a call failed, which is noticed without waiting for the deadline; or the deadline passed.
            PolicyLostError: a rank of the policy died or hangs.
        """
        names = [*map(RANK_NAME, range(len(sends))), *map(ENGINE_NAME, receives)]
        calls = [*sends, *receives.values()]
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return gather(calls, deadline_s=left, what=what, name=names.__getitem__)[: len(sends)]
        except RunError as error:
            if self._store is not None:
                record_failure(self._store, str(error))
            lost = lost_engines(sends, receives, str(error))
            self._store = None  # closed with its last reference: a process that comes later fails at once
            raise AttemptError(str(error), lost) from error


def lost_engines(sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], failure: str) -> dict[int, str]:
    """Engines that cannot take part in another attempt. Waits up to SETTLE_S for unfinished calls.

    Args:
        sends: calls of the policy's ranks, by rank; may be empty.
        receives: calls of the engines, by number.
        failure: the attempt's failure, for messages.

    Returns:
        Why each of these engines must be replaced, by its number.

    Raises:
        PolicyLostError: a rank of the policy died or hangs.
    """
    ranks = {RANK_NAME(rank): call for rank, call in enumerate(sends)}
    calls = [*sends, *receives.values()]
    over = set(ray.wait(calls, num_returns=len(calls), timeout=SETTLE_S)[0])
    lost = {}
    for number, call in receives.items():
        if call not in over:
            lost[number] = f"{failure}; {ENGINE_NAME(number)} does not come back"
            continue
        try:
            ray.get(call)
        except RayError as error:
            if is_lost(error):
                told = f"{ENGINE_NAME(number)} {explain(error)}"
                lost[number] = failure if told in failure else f"{failure}; {told}"
    overdue = [name for name, call in ranks.items() if call not in over]
    _require_policy([RANK_NAME(rank) for rank in lost_among(sends, 0.0)], "gone", failure)
    _require_policy([name for name in overdue if report_hanging([name])], "stuck", failure)
    if not lost:  # otherwise a library may hold ranks until a lost engine is ended
        _require_policy(overdue, "stuck", failure)
    return lost


def _require_policy(missing: Sequence[str], state: str, failure: str) -> None:
    if missing:
        raise PolicyLostError(f"{failure}; {listed(missing)} is {state}, and no rank of the policy can be replaced")
