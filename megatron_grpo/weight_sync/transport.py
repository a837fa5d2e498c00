"""Runs on the driver: brings versions of the policy's weights into every engine, with retries."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from megatron_grpo.cluster.process_log import ENGINE_NAME
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.refit_calls import AttemptError, PolicyLostError, RefitCalls, RefitError
from megatron_grpo.weight_sync.refit_checks import Canary, RefitChecks
from megatron_grpo.weight_sync.transfer_modes import AdapterMode, FilesMode, LinkMode, TransferMode, TransferReport

logger = logging.getLogger(__name__)


class RefitState(Enum):
    """Progress of the engines' current version."""

    LINKED = auto()
    RECEIVED = auto()  # every worker has verified the version; engines do not serve
    COMMITTED = auto()  # engines hold it as their version, and wait for the canary before they serve
    SERVING = auto()
    BROKEN = auto()  # no link was made, or an attempt failed: engines may hold half a version, links half a message


class WeightTransport:
    """Publishes the policy's weights to engines, in attempts with a deadline."""

    def __init__(
        self, calls: RefitCalls, mode: TransferMode, config: RefitConfig, canary: Canary | None = None
    ) -> None:
        self._calls, self._mode, self._config = calls, mode, config
        self._engines = tuple(range(calls.generation.config.parallel.data))
        self._checks = RefitChecks(calls, canary, adapters_alone=config.adapters == "alone")
        self._state = RefitState.BROKEN
        self._linked: tuple[int, ...] = ()  # engines in the current links
        self._version = 0  # the version that was published last
        self._replaced: list[str] = []  # a text on each engine that was replaced since the last report
        self._remaining_retries = config.retries  # of the current version
        self._failures: list[str] = []  # failed attempts at the current version

    def connect(self) -> None:
        """Connect policy and engines, before the first publish; RefitError: a process failed."""
        self._state = RefitState.BROKEN
        try:
            self._connect(self._engines)
        except AttemptError as error:
            raise RefitError(str(error)) from None

    def disconnect(self) -> None:
        """Give up all links: the next publish makes them anew."""
        self._state, self._calls.store = RefitState.BROKEN, None

    def publish(self, version: int) -> TransferReport:
        """Send the policy's weights to every engine and commit them as `version`; `admit` follows.

        Raises:
            RefitError: every attempt failed, or engines hold other weights than the policy.
            PolicyLostError: a rank of the policy died or hangs.
        """
        began = time.monotonic()
        report = self._publish_to(self._engines, version)
        self._version = version
        return self._complete_report(report, began)

    def admit(self, report: TransferReport) -> TransferReport:
        """Let engines serve their committed version, if the canary allows it.

        If no canary is due, engines serve since their commit. This is a call of its own because engines that share the
        policy's devices have memory to compute only once the policy has left them. The returned report has the figures
        of the checks.

        Raises:
            RefitError: an engine failed, or does not compute what the policy does; it does not serve.
        """
        began = time.monotonic()
        report = self._complete_report(self._admit(report), began)
        return replace(report, checks=self._checks.take_figures())

    def describe_differences(self) -> str:
        """Describe the tensors in which engines differ from the policy, for messages."""
        # Both sides have their weights on the devices when this is called.
        try:
            deadline = time.monotonic() + self._config.timeout_s
            differences = self._checks.find_differences(self._engines, deadline)
        except AttemptError as error:
            raise RefitError(str(error)) from None
        if differences:
            return "; ".join(differences)
        folder = self._calls.policy.settings.folder
        return (
            "all weights are the policy's as the kernels hold them, so the computation differs: compare config.json, "
            f"attention and positions (python -m megatron_grpo.verify model={folder} compares the policy's side with "
            "transformers), and set generation.engine.enforce_eager=true"
        )

    def require_checks(self) -> None:
        if self._checks.canary is not None:
            self._checks.canary.require_checks()

    def restore(self, lost_engines: Mapping[int, str]) -> None:
        """Replace engines that were lost between refits, and publish to them only.

        SamplingError: the engines could not be replaced. PolicyLostError: a rank of the policy is gone, too.
        """
        try:
            self._replace(lost_engines)
            self._admit(self._publish_to(tuple(sorted(lost_engines)), self._version))
        except PolicyLostError:
            raise
        except RunError as error:
            raise SamplingError(str(error)) from error

    def join(self, engine: int, version: int) -> None:
        """Publish to a new engine alone, and later to all.

        Raises RefitError if it does not serve the version, and is left out. PolicyLostError: as `publish`.
        """
        self._admit(self._publish_to((engine,), version))
        self._engines = (*self._engines, engine)

    def leave(self, engine: int) -> None:
        """Publish to an engine no more."""
        self._engines = tuple(number for number in self._engines if number != engine)

    def close(self) -> None:
        """Delete files that the transport has written; idempotent."""
        self._mode.close()

    def _publish_to(self, engines: tuple[int, ...], version: int) -> TransferReport:
        self._remaining_retries, self._failures = self._config.retries, []
        return self._attempt_until_committed(engines, version)

    def _attempt_until_committed(self, engines: tuple[int, ...], version: int) -> TransferReport:
        # A version is verified before it is served. Engines stop serving before their first weight changes, every
        # worker checks the version and checksum of every buffer that it receives, and the driver commits the version in
        # a second call, only after all workers of all engines have verified it. So a worker that fails, a damaged
        # buffer or an attempt cut off by its deadline leaves engines that serve nothing, never engines that serve two
        # versions or half of one. The next attempt starts over with new links, since half a message may be left in an
        # old one.
        while True:
            try:
                if self._state is RefitState.BROKEN or self._linked != engines:
                    self._checks.must_compare = True
                    self._connect(engines)
                deadline = time.monotonic() + self._config.timeout_s
                report = self._mode.send(version, engines, deadline, on_sent=self._checks.begin)
                self._state = RefitState.RECEIVED
                self._checks.require_equal_weights(version, engines, deadline)
                self._commit(version, engines, deadline)
            except AttemptError as error:
                self._recover(error)
            else:
                return replace(report, retries=len(self._failures))

    def _commit(self, version: int, engines: tuple[int, ...], deadline: float) -> None:
        awaits_canary = self._checks.awaits_canary
        commits = self._calls.generation.submit_to(engines, Engine.commit_weights, version, awaits_canary)
        self._calls.wait([], commits, deadline, f"commit of version {version}")
        self._state = RefitState.COMMITTED if awaits_canary else RefitState.SERVING

    def _admit(self, report: TransferReport) -> TransferReport:
        while self._state is RefitState.COMMITTED:
            try:
                self._checks.run_canary(report.version, self._linked, self._config.timeout_s)
                self._state = RefitState.SERVING
            except AttemptError as error:
                if self._calls.generation.config.is_colocated:  # the policy's weights have left the devices
                    raise RefitError(str(error)) from None
                self._recover(error)
                retried = self._attempt_until_committed(self._linked, report.version)
                report = replace(retried, seconds=report.seconds, replaced=report.replaced)
        return report

    def _complete_report(self, report: TransferReport, began: float) -> TransferReport:
        """Add the seconds since `began`, and the engines replaced meanwhile."""
        replaced, self._replaced = (*report.replaced, *self._replaced), []
        return replace(report, seconds=report.seconds + time.monotonic() - began, replaced=replaced)

    def _recover(self, error: AttemptError) -> None:
        """Replace lost engines or use up a retry; RefitError if neither is possible."""
        self._state = RefitState.BROKEN
        logger.warning("attempt %d: %s", len(self._failures) + 1, error)
        self._failures.append(str(error))
        # An attempt that costs an engine is no retry: the fault goes with the engine, and the number of replacements
        # has a limit of its own. The other engines receive the version once more.
        if error.lost_engines:
            self._replace(error.lost_engines)
        elif self._remaining_retries:
            self._remaining_retries -= 1
        else:
            raise RefitError("; tried again: ".join(self._failures)) from None

    def _replace(self, lost_engines: Mapping[int, str]) -> None:
        try:
            self._calls.generation.replace(lost_engines)
        except RunError as error:
            raise RefitError(str(error)) from error
        self._replaced += [f"{ENGINE_NAME(number)} was replaced: {reason}" for number, reason in lost_engines.items()]

    def _connect(self, engines: tuple[int, ...]) -> None:
        self._mode.connect(engines, anew=self._state is RefitState.BROKEN)
        self._state, self._linked = RefitState.LINKED, engines


def make_transport(
    policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig, run_dir: Path, canary: Canary | None = None
) -> WeightTransport:
    """Make the transport, not yet connected; its files are told apart by `run_dir`."""
    calls = RefitCalls(policy, generation)
    links = AdapterMode if config.adapters == "alone" else LinkMode
    mode = FilesMode(calls, config, run_dir) if config.mode == "files" else links(calls, config)
    return WeightTransport(calls, mode, config, canary)
