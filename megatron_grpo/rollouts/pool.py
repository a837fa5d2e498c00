"""The driver's handle of the rollout workers: prompts in, groups out, as outcomes and references to tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from megatron_grpo.batch.generation_requests import EngineCounts, SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.cluster.futures import build_overdue_error
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_names import ENGINE_NAME, WORKER_NAME
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import RolloutsConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.environments.environment_processes import EnvironmentPool
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.failures import require_few_failures
from megatron_grpo.rollouts.rollout import ATTEMPTS
from megatron_grpo.rollouts.rollout_settings import RolloutSettings
from megatron_grpo.rollouts.shards import groups_of
from megatron_grpo.rollouts.workers import RolloutWorkers

COUNTS_S = 20.0
"""Deadline for fetching the counts of all engines, in seconds."""

GRACE_S = 20.0
"""Seconds by which the driver's deadlines exceed those of workers, whose messages are more specific."""


RestoreEngines = Callable[[Mapping[int, str]], None]
"""Function that replaces lost engines, given by number with the reason; raises SamplingError if it cannot."""


def refuse_to_restore(lost: Mapping[int, str]) -> None:
    """A `RestoreEngines` that replaces no engine: raises SamplingError with the reasons."""
    raise SamplingError("; ".join(dict.fromkeys(lost.values())))


class LostEngines:
    """Replaces the engines that rollout workers report as lost."""

    def __init__(self, engines: Sequence[Any], restore: RestoreEngines) -> None:
        """
        Args:
            engines: actors in the order of their numbers; `restore` puts replacements into this sequence.
            restore: replaces engines.
        """
        self._engines, self._restore = engines, restore
        self._known = list(engines)
        self._restarts = [0] * len(engines)
        self._users: list[tuple[Any, Sequence[int]]] = []
        self._reports: dict[Any, Any] = {}

    def watch(self, worker: Any, numbers: Sequence[int]) -> None:
        """Listen to the reports of a rollout worker, which uses the engines with these numbers."""
        self._users.append((worker, numbers))
        self._reports[worker.lost_engines.remote()] = worker

    def hand_on(self) -> None:
        """Tell workers about engines that were replaced since the last call, for example by a refit."""
        for number, actor in enumerate(self._engines):
            if actor is not self._known[number]:
                self._known[number] = actor
                self._restarts[number] += 1
                self._tell(number, "replace_engine", actor)

    def some(self, calls: Sequence[Any], timeout_s: float) -> tuple[list[Any], bool]:
        """Wait until one of the calls is over, or a worker reports lost engines, which are then replaced if possible.

        Args:
            calls: calls of any workers.
            timeout_s: most seconds to wait.

        Returns:
            The call that is over, if any, and whether a worker has reported lost engines.
        """
        self.hand_on()
        ready, _ = ray.wait([*calls, *self._reports], num_returns=1, timeout=max(timeout_s, 0.0))
        if not ready or ready[0] not in self._reports:
            return ready, False
        worker, lost = self._reports.pop(ready[0]), {}
        with suppress(RayError):  # if the worker died, its other calls raise the error
            losses = ray.get(ready[0])
            self._reports[worker.lost_engines.remote()] = worker
            lost = {n: loss.reason for n, loss in losses.items() if loss.restarts == self._restarts[n]}
        if lost:
            try:
                self._restore(lost)
            except SamplingError as error:
                for number in lost:
                    self._tell(number, "give_up_engine", str(error))
            self.hand_on()
        return [], True

    def _tell(self, number: int, method: str, *args: Any) -> None:
        for worker, numbers in self._users:
            if number in numbers:
                getattr(worker, method).remote(number, *args)


class CompletePrompt(NamedTuple):
    """A prompt whose group is complete and can be taken."""

    batch: int
    """Number of the batch in which the prompt was begun."""
    number: int
    """Number of the prompt, as given to `RolloutPool.begin`."""
    worker: int
    """Number of the rollout worker that has the group."""


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """Prompts that `RolloutPool.begin` has begun."""

    batch: int
    """Unique number of the batch."""
    sampled: dict[int, Any]
    """By worker, a reference that is ready when all its responses are sampled."""
    calls: dict[Any, int]
    """Ray generators of references to numbers of complete prompts, with the worker of each; those of done workers are
    removed."""

    def is_done(self) -> bool:
        """Whether all prompts are sampled and scored, or have failed."""
        ends = [call.completed() for call in self.calls]
        return len(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) == len(ends) if ends else True


class RolloutPool(RolloutWorkers):
    """The driver's handle of the rollout workers. `start()` returns at once; then call `wait_ready()`."""

    def __init__(
        self,
        config: RolloutsConfig,
        engines: Sequence[Any],
        environments: Mapping[str, EnvironmentPool],
        *,
        generation_timeout_s: float,
        max_total_sequence_length: int,
        max_turns: int = 1,
        routed: RoutedForm | None = None,
        endpoint: EndpointSettings | None = None,
        restore: RestoreEngines = refuse_to_restore,
    ) -> None:
        """
        Args:
            config: number of workers, deadline of a rollout, and the fraction that may fail.
            engines: Ray actors (`Engine`), in the order of their numbers; empty: nothing is sampled.
            environments: pools of environment processes by task name, not yet started.
            generation_timeout_s: deadline for sampling one generation batch, and for each call on its tokens.
            max_total_sequence_length: most tokens of prompt and responses together.
            max_turns: most responses of one rollout.
            routed: form of the experts that engines return; None: engines return none.
            endpoint: settings of the endpoints for agents; None: there are no endpoints.
            restore: replaces lost engines in `engines` in place, or raises SamplingError.
        """
        super().__init__(
            config.num_workers,
            engines,
            environments,
            timeout_s=generation_timeout_s,
            routed=routed,
            endpoint=endpoint,
        )
        self._config = config
        self._lost = LostEngines(engines, restore)
        self._max_total_sequence_length = max_total_sequence_length
        self._max_turns = max_turns
        self.remarks: list[str] = []
        """Events for the log of the run; the loop writes them and clears the list."""
        self.trainer_state = TrainerState()
        """Progress of the run, for the reward functions of the next responses."""
        self._batches = count()
        self._scoring_s = ATTEMPTS * config.timeout_s + GRACE_S

    def start(self) -> None:
        """Begin to start the environments and the workers."""
        super().start()
        for actor, numbers in zip(self.actors, self._engines_of, strict=True):
            self._lost.watch(actor, numbers)

    def make_settings(
        self, samples_per_prompt: int, sampling: SamplingSettings, run_seed: int, step: int
    ) -> RolloutSettings:
        """Make the settings of a generation batch, for `collect` and `begin`.

        The seed of a response comes from `run_seed`, `step`, the prompt's row, and the numbers of the sample and turn.

        Args:
            samples_per_prompt: responses to each prompt.
            sampling: how tokens are drawn.
            run_seed: seed of the run.
            step: number of the generation batch.
        """
        return RolloutSettings(
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            run_seed=run_seed,
            step=step,
            max_total_sequence_length=self._max_total_sequence_length,
            max_turns=self._max_turns,
            timeout_s=self._config.timeout_s,
            trainer_state=self.trainer_state,
        )

    def collect(self, prompts: Sequence[DatumSpec], settings: RolloutSettings, timer: StepTimer) -> list[SampledGroup]:
        """Sample responses to each prompt and score them.

        The time until the last response is sampled counts as "generation", the scoring after that as "environment".

        Returns:
            A group for each prompt, in the order of the prompts.

        Raises:
            SamplingError: an engine or an environment failed, or too many rollouts failed.
        """
        with timer.phase("generation"):
            under_way = self.begin(dict(enumerate(prompts)), settings)
        return self.finish(under_way, timer)

    def begin(self, prompts: Mapping[int, DatumSpec], settings: RolloutSettings) -> PendingBatch:
        """Begin to sample and score; then call `finish`, or `list_complete` and `take`. Batches may overlap.

        Args:
            prompts: prompts by their number in the batch, in ascending order.
            settings: common settings of its rollouts, from `make_settings`.
        """
        self._lost.hand_on()
        batch = next(self._batches)
        parts = {n: part for n, part in enumerate(self._share_out(list(prompts.items()))) if part}
        calls = {
            self.actors[number].collect.options(num_returns="streaming").remote(batch, settings, part): number
            for number, part in parts.items()
        }
        return PendingBatch(batch, {number: self.actors[number].generated.remote(batch) for number in parts}, calls)

    def finish(self, under_way: PendingBatch, timer: StepTimer) -> list[SampledGroup]:
        """Wait for all prompts of a batch; returns and raises the same as `collect`."""
        with timer.phase("generation"), phase("generation"):
            limit, since = self._timeout_s + GRACE_S, time.monotonic()
            pending = {call: worker for worker, call in under_way.sampled.items()}
            while pending:
                over, replaced = self._wait(pending, since, limit, "generation")
                since = time.monotonic() if replaced else since
                for call in over:
                    del pending[call]
            self._gather(under_way.sampled, limit, "generation")
        with timer.phase("environment"):
            complete = self.list_complete([under_way])
            since = time.monotonic()
            while under_way.calls:
                self._wait(under_way.calls, since, self._scoring_s, "scoring")
                complete += self.list_complete([under_way])
            return self.take(sorted(complete))

    def list_complete(self, batches: Sequence[PendingBatch]) -> list[CompletePrompt]:
        """Return the prompts that have become complete since the last call, without waiting.

        Raises:
            SamplingError: an engine or an environment failed.
        """
        found: list[CompletePrompt] = []
        waiting = {call: (one, worker) for one in batches for call, worker in one.calls.items()}
        # One question for all workers, since this is called for every prompt or two that become complete.
        while waiting and (ready := ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0]):
            for call in ready:
                one, worker = waiting[call]
                try:
                    reference = next(call)
                except StopIteration:
                    del one.calls[call], waiting[call]
                    continue
                (numbers,) = self._gather({worker: reference}, self._timeout_s, "generation")
                found += [CompletePrompt(one.batch, number, worker) for number in numbers]
        return found

    def take(self, complete: Sequence[CompletePrompt]) -> list[SampledGroup]:
        """Fetch the groups of complete prompts, in this order; workers then forget them.

        Raises:
            SamplingError: a worker failed, or too many of the rollouts failed.
        """
        by_worker: dict[int, list[CompletePrompt]] = {}
        for one in complete:
            by_worker.setdefault(one.worker, []).append(one)
        calls = {
            worker: self.actors[worker].hand_over.remote([(one.batch, one.number) for one in mine])
            for worker, mine in by_worker.items()
        }
        answers = self._gather(calls, self._timeout_s, "handing over of rollouts")
        found: dict[CompletePrompt, SampledGroup] = {}
        for mine, collected in zip(by_worker.values(), answers, strict=True):
            self.remarks += collected.remarks
            found |= zip(mine, groups_of(collected), strict=True)
        groups = [found[one] for one in complete]
        outcomes = [one for group in groups for one in group.outcomes]
        try:
            require_few_failures(outcomes, self._config.max_failed_fraction)
        except SamplingError as error:  # a hanging engine misses rollout deadlines before the generation deadline
            engines = [ENGINE_NAME(number) for number in range(len(self.engines))]
            raise SamplingError(f"{error}{report_hanging(engines, 'generation')}") from None
        return groups

    def wait_for_groups(self, batches: Sequence[PendingBatch], since: float) -> None:
        """Wait until `list_complete` may return a prompt; engines that are lost meanwhile are replaced.

        Args:
            batches: all batches under way.
            since: time.monotonic() when the caller began to wait for groups, from which the deadlines of generation and
                scoring count.

        Raises:
            SamplingError: no group arrived within the deadline.
        """
        calls = {call: worker for one in batches for call, worker in one.calls.items()}
        self._wait(calls, since, self._timeout_s + GRACE_S + self._scoring_s, "generation")

    def _wait(self, calls: Mapping[Any, int], since: float, deadline_s: float, what: str) -> tuple[list[Any], bool]:
        """Wait as `LostEngines.some` for calls, given with their workers; SamplingError names the overdue workers."""
        over, replaced = self._lost.some(list(calls), since + deadline_s - time.monotonic())
        if not over and not replaced:
            workers = [WORKER_NAME(worker) for worker in sorted(set(calls.values()))]
            raise SamplingError(str(build_overdue_error(what, workers, deadline_s)))
        return over, replaced

    def take_engine_counts(self) -> list[EngineCounts]:
        """Take each engine's counts since the last call; zeros for a failed engine, which its next request reports."""
        calls = [engine.take_counts.remote() for engine in self.engines]
        over = set(ray.wait(calls, num_returns=len(calls), timeout=COUNTS_S)[0])
        counts = []
        for call in calls:
            try:
                counts.append(ray.get(call) if call in over else EngineCounts())
            except RayError:
                counts.append(EngineCounts())
        return counts
