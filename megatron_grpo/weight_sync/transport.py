"""Runs on the driver: brings one version of the policy's weights into every engine, with retries.

A version is verified before it is served. Engines stop serving before their first weight changes, every worker checks
the version and checksum of every buffer it receives, and the driver commits the version in a second call only after all
workers of all engines have confirmed it. So a worker that fails, a damaged buffer or an attempt cut off by its deadline
leaves engines that serve nothing, never engines that serve two versions or half of one; the next attempt starts over,
with new links, since half a message may be left in an old one. An attempt that costs an engine is not counted as a
retry: the engine is replaced and the others receive the version once more.

Weights that arrived intact may still be wrong where they are used, so two checks compare engines with the policy.
Before the commit, when that check is due, all weights are compared as the kernels hold them. After the commit and
before engines serve, the canary compares log-probabilities. A failed check is not repeated, because such a fault does
not heal by itself.

Neither check finds an adapter that is missing in the weights which the policy publishes. The fingerprints of both sides
are then the base model's, since both are taken of published weights. The canary compares what the policy computes, with
its adapters, but allows what rounding may explain, and adapters move log-probabilities by less for many steps, in
bfloat16 perhaps for ever. So at every refit the policy's ranks compare the weights that they publish with what their
layers compute (`models/adapter_check.py`); weights of engines are compared until adapters have moved, since before
they equal the base model's; and the canary also tells an engine that is nearer to the base model than to the policy.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from torch.distributed import TCPStore

from megatron_grpo.cluster.actor_calls import Arguments, Method
from megatron_grpo.cluster.futures import explain_error, find_lost_calls, gather, is_canary_failure, is_lost, join_names
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.process_names import ENGINE_NAME, RANK_NAME
from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError
from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.generation.engine_canary import CanaryPrompt
from megatron_grpo.generation.engine_group import VllmGeneration
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.weight_layouts import shard_engine
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.canary import Canary, base_logprobs, policy_logprobs, rank_adapters
from megatron_grpo.weight_sync.fingerprints import differing, policy_fingerprints
from megatron_grpo.weight_sync.groups import record_failure

logger = logging.getLogger(__name__)

SETTLE_S = 15.0
"""Seconds for the other calls to end once one has failed. Those that wait for a transfer end within `groups.LOOK_S`."""


class RefitError(RunError):
    """A refit did not complete on every worker, so no engine may serve the new version."""


class CanaryFailedError(RefitError):
    """The log-probabilities of engines differ from the policy's after a refit, so the engines do not serve it."""


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
    checks: Mapping[str, float] = field(default_factory=dict)
    """Figures of the canary and of the comparison of weights, if they were due."""


class WeightTransport(ABC):
    """Moves the policy's weights into the engines, in attempts with a deadline, and handles failed ones.

    A mode of transfer defines `_connect` and `_attempt`.

    Args:
        policy: the model whose weights are sent.
        generation: the engines that receive them.
        config: deadline, retries and size of buckets.
        canary: the checks before engines serve; None: there are none.
    """

    mode: ClassVar[RefitMode]

    def __init__(
        self, policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig, canary: Canary | None = None
    ) -> None:
        self._canary = canary
        self._scores: list[ray.ObjectRef] | None = None
        """The policy's log-probabilities of the canary, by rank, while engines wait for it; None: they do not."""
        self._base_scores: list[ray.ObjectRef] = []
        """Log-probabilities of the canary without the policy's adapters, by rank; empty without adapters."""
        self._adapters: list[ray.ObjectRef] = []
        """The check of the policy's adapters (`check_adapters`), by rank; empty if it has none."""
        self._unchecked = True
        """Whether links were made since the weights were compared, or adapters were still zero then."""
        self._are_equal = False
        """Whether engines are known to have the policy's weights of the version that was committed last."""
        self._checks: dict[str, float] = {}
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
        """Send the policy's weights to every engine and commit them as `version`; `start_serving` follows.

        Raises:
            RefitError: in every attempt the deadline passed, a process died or a checksum differed; says which. Or
                engines hold other weights than the policy, or compute something else with them.
            PolicyLostError: a rank of the policy died or hangs.
        """
        began = time.monotonic()
        report = self._deliver(version, self._engines())
        self._version = version
        replaced, self._replaced = tuple(self._replaced), []
        return replace(report, seconds=time.monotonic() - began, replaced=replaced)

    def start_serving(self, report: TransferReport) -> TransferReport:
        """Let engines that share the policy's devices serve the weights that they received, if the canary allows it.

        They have no memory to compute before the policy has left the devices. Other engines serve already.

        Args:
            report: report of the refit.

        Returns:
            The report with the figures of the canary and of the comparison of weights.

        Raises:
            RefitError: an engine failed, or does not compute what the policy does; it does not serve.
        """
        try:
            self._admit(report.version, self._engines())
        except AttemptError as error:
            raise RefitError(str(error)) from None
        checks, self._checks = self._checks, {}
        return replace(report, checks=checks)

    def differing_weights(self) -> str:
        """The tensors in which engines differ from the policy, for messages; both have their weights on the devices.

        Raises:
            RefitError: a process failed.
        """
        try:
            found = self._differences(self._engines(), time.monotonic() + self._timeout_s)
        except AttemptError as error:
            raise RefitError(str(error)) from None
        if found:
            return "; ".join(found)
        folder = self._policy.settings.folder
        return (
            "all weights are the policy's as the kernels hold them, so the computation differs: compare config.json, "
            f"attention and positions (python -m megatron_grpo.verify model={folder} compares the policy's side with "
            "transformers), and set generation.engine.enforce_eager=true"
        )

    def require_checks(self) -> None:
        """Let the canary and the comparison of all weights follow the next refit, since something is off."""
        if self._canary is not None:
            self._canary.require_checks()

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
                    self._unchecked = True
                    self._connect(engines)
                report = self._attempt(version, engines)
                if not self._generation.config.is_colocated:
                    self._admit(version, engines)
                return replace(report, retries=len(failures))
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
        """Let engines serve a version that all of them have verified, or, if the canary is due, only commit it."""
        has_moved = self._require_adapters(version, deadline)
        self._are_equal = version == 0  # the weights of the model folder, which engines had loaded themselves
        if self._canary is not None and self._canary.compares_weights(version, new=self._unchecked):
            began = time.monotonic()
            found = self._differences(engines, deadline)
            self._checks["weight_check_s"] = time.monotonic() - began
            if found:
                raise RefitError(f"version {version} is not served: {'; '.join(found)}")
            self._canary.compared()
            self._unchecked, self._are_equal = not has_moved, True
        guarded = self._scores is not None
        commits = self._on_engines(engines, Engine.commit_weights, version, guarded)
        self._complete([], commits, deadline, f"commit of version {version}")

    def _require_adapters(self, version: int, deadline: float) -> bool:
        """Whether weights can be compared by now: adapters have moved, or there are none.

        Raises:
            RefitError: a published weight is not what the policy's adapted layer computes with.
        """
        checks = self._complete(self._adapters, {}, deadline, "comparing adapters")
        faults = [f"{RANK_NAME(rank)}: {text}" for rank, check in enumerate(checks) for text in check.faults]
        if faults:
            raise RefitError(f"version {version} is not served: {'; '.join(faults)}")
        return not checks or any(check.has_moved for check in checks)

    def _begin_checks(self) -> None:
        """Let the policy compute its side of the checks that are due, once its ranks have sent the weights."""
        self._scores, self._base_scores, self._adapters = None, [], []
        if self._canary is None:
            return
        has_adapters = self._policy.settings.config.lora.rank > 0
        if has_adapters:
            self._adapters = self._policy.submit(rank_adapters)
        if self._canary.is_due():
            self._scores = self._policy.submit(policy_logprobs, self._canary.sequences)
            if has_adapters:
                self._base_scores = self._policy.submit(base_logprobs, self._canary.sequences)

    def _admit(self, version: int, engines: tuple[int, ...]) -> None:
        """Compare the canary's log-probabilities, and let the engines serve; does nothing if they serve already."""
        if self._canary is None or self._scores is None:
            return
        began = time.monotonic()
        deadline = began + self._timeout_s
        found = self._complete([*self._scores, *self._base_scores], {}, deadline, "the policy's canary")
        expected = next(one for one in found if one is not None)
        base = next((one for one in found[len(self._scores) :] if one is not None), None)
        canary, limit = self._canary, self._canary.limit
        prompt = CanaryPrompt(version, canary.sequences, expected, limit, canary.adapter_rounding, base)
        calls = self._on_engines(engines, Engine.check_canary, prompt)
        errors = self._complete([], calls, deadline, f"canary of version {version}")
        self._scores = None
        seconds = time.monotonic() - began
        canary.took(seconds)
        if self._are_equal:
            canary.measure(max(errors))
        self._checks |= {"canary_logprob_error": max(errors), "canary_limit": limit, "canary_s": seconds}

    def _differences(self, engines: Sequence[int], deadline: float) -> list[str]:
        """A text on each tensor, as an engine's worker holds it, that rounding does not explain."""
        shape = self._policy.settings.shape
        shards = shard_engine(self._generation.config.parallel, shape)
        stages = self._policy.submit(policy_fingerprints, shards)
        calls = self._on_engines(engines, Engine.fingerprint_weights)
        answers = self._complete(stages, calls, deadline, "comparing weights")
        parts = answers[: len(stages)]
        expected = [{name: one for part in parts for name, one in part[rank].items()} for rank in range(len(shards))]
        rounding = self._canary.rounding if self._canary is not None else 0.0
        texts = []
        for number, workers in zip(calls, answers[len(stages) :], strict=True):
            for rank, held in enumerate(workers):
                for name, error in differing(expected[rank], held, rounding).items():
                    where = f"{ENGINE_NAME(number)}, worker {rank}"
                    texts.append(f"{where}: {name} differs from the policy's by {error:.2g} of its norm")
        return texts

    def _on_engines(
        self, engines: Sequence[int], method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> dict[int, ray.ObjectRef]:
        return dict(zip(engines, self._generation.submit_to(engines, method, *args, **kwargs), strict=True))

    def _complete(
        self, sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], deadline: float, what: str
    ) -> list[Any]:
        """Wait for both sides; returns the results of the senders, then those of the receivers.

        Raises:
            CanaryFailedError: an engine does not compute what the policy does.
            AttemptError: a call failed, which is noticed without waiting for the deadline; or the deadline passed.
            PolicyLostError: a rank of the policy died or hangs.
        """
        names = [*map(RANK_NAME, range(len(sends))), *map(ENGINE_NAME, receives)]
        calls = [*sends, *receives.values()]
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return gather(calls, deadline_s=left, phase_name=what, name=names.__getitem__)
        except RunError as error:
            if is_canary_failure(error.__cause__):
                raise CanaryFailedError(str(error)) from error
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
                told = f"{ENGINE_NAME(number)} {explain_error(error)}"
                lost[number] = failure if told in failure else f"{failure}; {told}"
    overdue = [name for name, call in ranks.items() if call not in over]
    _require_policy([RANK_NAME(rank) for rank in find_lost_calls(sends, 0.0)], "gone", failure)
    _require_policy([name for name in overdue if report_hanging([name])], "stuck", failure)
    if not lost:  # otherwise ranks may hang in a library only until the lost engine is ended
        _require_policy(overdue, "stuck", failure)
    return lost


def _require_policy(missing: Sequence[str], state: str, failure: str) -> None:
    if missing:
        raise PolicyLostError(f"{failure}; {join_names(missing)} is {state}, and no rank of the policy can be replaced")
