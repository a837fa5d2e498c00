"""How one version of the policy's weights reaches every generation worker."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import ray
from ray.exceptions import RayError
from torch.distributed import Store, TCPStore

from megatron_grpo.cluster.addresses import node_address
from megatron_grpo.cluster.futures import explain, gather, is_lost, listed, lost_among
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError
from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.platform.device import open_store
from megatron_grpo.sampler.engine_group import ENGINE_NAME, VllmGeneration
from megatron_grpo.trainer.group import MegatronPolicy
from megatron_grpo.weights.refit.groups import Rendezvous


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


SETTLE_S = 15.0
"""Time that everybody has to come back once one has failed: links that are closed are noticed at once, those that are
silent when the deadline passes, which began a little later for the ranks than for the driver."""

RANK_NAME = "policy rank {}".format


def lost_engines(sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], failure: str) -> dict[int, str]:
    """Engines that cannot take part in another attempt. Waits up to SETTLE_S for calls that are not over.

    Args:
        sends: what the policy's ranks were called for, by rank; empty: nothing.
        receives: what the engines were called for, by number.
        failure: the attempt's failure, for messages.

    Returns:
        By number, why the engine has to be replaced.

    Raises:
        PolicyLostError: a rank of the policy died or hangs.
    """
    ranks = {RANK_NAME(rank): call for rank, call in enumerate(sends)}
    calls = [*sends, *receives.values()]
    over = set(ray.wait(calls, num_returns=len(calls), timeout=SETTLE_S)[0])
    lost = {}
    for number, call in receives.items():
        error = _error_of(call) if call in over else None
        if call not in over:
            lost[number] = f"{failure}; {ENGINE_NAME(number)} does not come back"
        elif error is not None and is_lost(error):
            told = f"{ENGINE_NAME(number)} {explain(error)}"
            lost[number] = failure if told in failure else f"{failure}; {told}"
    late = [name for name, call in ranks.items() if call not in over]
    _require_policy([RANK_NAME(rank) for rank in lost_among(sends, 0.0)], "gone", failure)
    _require_policy([name for name in late if report_hanging([name])], "stuck", failure)
    if not lost:  # else they may be waiting for an engine that is ended in a moment
        _require_policy(late, "stuck", failure)
    return lost


def _require_policy(missing: Sequence[str], state: str, failure: str) -> None:
    if missing:
        raise PolicyLostError(f"{failure}; {listed(missing)} is {state}, and no rank of the policy can be replaced")


def _error_of(call: ray.ObjectRef) -> RayError | None:
    """What a call that is over has raised."""
    try:
        ray.get(call)
    except RayError as error:
        return error
    return None


logger = logging.getLogger(__name__)


class AttemptError(Exception):
    """One attempt at a refit failed."""

    def __init__(self, text: str, lost: Mapping[int, str]) -> None:
        """
        Args:
            text: what happened.
            lost: engines that have to be replaced before another attempt, by number, and why.
        """
        super().__init__(text)
        self.lost = lost


class EngineTransport(WeightTransport):
    """Attempts at a transfer, each within the deadline, and what is made of one that fails."""

    mode: ClassVar[RefitMode]

    def __init__(self, policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig) -> None:
        self._policy = policy
        self._generation = generation
        self._config = config
        self._timeout_s, self._retries = config.timeout_s, config.retries
        self._bucket_bytes = int(config.bucket_mib * 2**20)
        self._linked: tuple[int, ...] = ()
        """Engines that the policy has links to; none after a failure: half a message may be left in one."""
        self._version = 0
        self._replaced: list[str] = []

    def connect(self) -> None:
        try:
            self._connect(self._engines())
        except AttemptError as error:
            raise RefitError(str(error)) from None

    def publish(self, version: int) -> TransferReport:
        began = time.monotonic()
        report = self._deliver(version, self._engines())
        self._version = version
        replaced, self._replaced = tuple(self._replaced), []
        return replace(report, seconds=time.monotonic() - began, replaced=replaced)

    def restore(self, lost: Mapping[int, str]) -> None:
        try:
            self._replace(lost)
            self._deliver(self._version, tuple(sorted(lost)))
        except PolicyLostError:
            raise
        except RunError as error:
            raise SamplingError(str(error)) from error

    def _engines(self) -> tuple[int, ...]:
        return tuple(endpoint.index for endpoint in self._generation.endpoints())

    def _deliver(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        """Bring engines to a version, in as many attempts as it takes; one that costs an engine is no retry."""
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
        """Put new engines in the place of lost ones.

        Raises:
            RefitError: they were replaced as often as is allowed, or do not come up.
        """
        try:
            self._generation.replace(lost)
        except RunError as error:
            raise RefitError(str(error)) from error
        self._replaced += [f"{ENGINE_NAME(number)} was replaced: {reason}" for number, reason in lost.items()]

    @abstractmethod
    def _connect(self, engines: tuple[int, ...]) -> None:
        """Let the policy and some engines come together, and remember in `_linked` that they have; AttemptError."""

    @abstractmethod
    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        """Bring one version into engines that are linked, and commit it there; AttemptError says what failed."""

    def _commit(self, version: int, engines: tuple[int, ...], deadline: float) -> None:
        """Let engines, which all have verified a version, serve it."""
        commits = self._on_engines("commit_weights", version, engines)
        self._complete([], commits, deadline, f"commit of version {version}")

    def _on_engines(self, method: str, version: int, engines: Sequence[int]) -> dict[int, ray.ObjectRef]:
        return dict(zip(engines, self._generation.submit(method, version, engines=engines), strict=True))

    def _let_go(self) -> None:
        """After a failure: whoever waits for others to come, waits no longer."""

    def _complete(
        self, sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], deadline: float, what: str
    ) -> list[Any]:
        """Wait for both sides; what the senders returned.

        Raises:
            AttemptError: one side failed, which is told without waiting for the deadline; or the deadline passed.
            PolicyLostError: a rank of the policy died or hangs.
        """
        names = [*map(RANK_NAME, range(len(sends))), *map(ENGINE_NAME, receives)]
        calls = [*sends, *receives.values()]
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return gather(calls, deadline_s=left, what=what, name=names.__getitem__)[: len(sends)]
        except RunError as error:
            self._let_go()
            raise AttemptError(str(error), lost_engines(sends, receives, str(error))) from error


class GroupTransport(EngineTransport):
    """Transfers over process groups that ranks of the policy and generation workers are members of."""

    _store: TCPStore | None = None

    @abstractmethod
    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        """Write what receivers have to know into the store, and let every rank of the policy join its groups."""

    @abstractmethod
    def _send(self, version: int) -> list[ray.ObjectRef]:
        """Let every rank of the policy send: of each what it sent, or None."""

    def _let_go(self) -> None:
        self._store = None  # it closes with the driver's end, and who looks for a lost engine in it fails at once

    def _connect(self, engines: tuple[int, ...]) -> None:
        """Make links between the policy and some engines, and none to others."""
        self._linked = ()
        ranks = {endpoint.index: endpoint.ranks for endpoint in self._generation.endpoints()}
        self._store = open_store(node_address(), self._timeout_s)
        *first, receivers = accumulate((ranks[engine] for engine in engines), initial=0)
        rendezvous = Rendezvous(
            host=self._store.host,
            port=self._store.port,
            receivers=receivers,
            timeout_s=self._timeout_s,
            same_gpus=self._generation.colocated,
        )
        sends = self._connect_senders(self._store, rendezvous)
        arguments = [(self.mode, asdict(rendezvous), offset) for offset in first]
        receives = self._generation.submit_each("connect_weights", arguments, engines)
        deadline = time.monotonic() + self._timeout_s
        self._complete(sends, dict(zip(engines, receives, strict=True)), deadline, "connecting the refit")
        self._linked = engines

    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        deadline = time.monotonic() + self._timeout_s
        receives = self._on_engines("receive_weights", version, engines)
        sends = self._send(version)
        answers = self._complete(sends, receives, deadline, f"refit of version {version}")
        sent = [one for one in answers if one is not None]
        self._commit(version, engines, deadline)
        return TransferReport(
            version=version,
            bytes_sent=sum(one.bytes for one in sent),
            tensors=sum(one.tensors for one in sent),
            buckets=sum(one.buckets for one in sent),
            seconds=0.0,
        )
