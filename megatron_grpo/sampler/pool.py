"""The driver's handle of the rollout workers: prompts in, groups out, as outcomes and references to tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.futures import overdue
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import RolloutsConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import EngineCounts, SamplingSettings
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.sampler.engines import ENGINE_NAME
from megatron_grpo.sampler.plan import RolloutPlan, require_few_failures
from megatron_grpo.sampler.rollout import ATTEMPTS
from megatron_grpo.sampler.shards import groups_of
from megatron_grpo.sampler.step_tokens import StepTokens
from megatron_grpo.sampler.worker_group import WORKER_NAME, LostEngines, Restore, WorkerGroup, not_replaced

COUNTS_S = 20.0
"""Deadline for fetching the counts of all engines, in seconds."""

GRACE_S = 20.0
"""Seconds by which the driver's deadlines exceed those of workers, whose messages say more but come later."""


class Complete(NamedTuple):
    """A prompt whose group is complete and can be taken."""

    batch: int
    """Number of the batch in which the prompt was begun."""
    number: int
    """Number of the prompt, as given to `RolloutPool.begin`."""
    worker: int
    """Number of the rollout worker that has the group."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Prompts that `RolloutPool.begin` has begun."""

    batch: int
    """Unique number of the batch."""
    sampled: dict[int, Any]
    """By worker, a reference that is ready when all its responses are sampled."""
    calls: dict[int, Any]
    """By worker that is not done, a Ray generator of references to numbers of complete prompts."""

    def is_done(self) -> bool:
        """Whether all prompts are sampled and scored, or have failed."""
        ends = [call.completed() for call in self.calls.values()]
        return len(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) == len(ends) if ends else True


class RolloutPool:
    """The driver's handle of rollout workers in Ray actors. `start()` returns at once; then call `wait_ready()`."""

    def __init__(
        self,
        config: RolloutsConfig,
        workers: WorkerGroup,
        *,
        max_total_sequence_length: int,
        max_turns: int = 1,
        restore: Restore = not_replaced,
    ) -> None:
        """
        Args:
            config: deadline of a rollout, and the fraction that may fail.
            workers: the rollout workers, not yet started.
            max_total_sequence_length: most tokens of prompt and responses together.
            max_turns: most responses of one rollout.
            restore: replaces lost engines in `workers.engines` in place, or raises SamplingError.
        """
        self._config, self._workers = config, workers
        self._engines = workers.engines
        self._lost = LostEngines(workers.engines, restore)
        self._max_total_sequence_length = max_total_sequence_length
        self._max_turns = max_turns
        self.remarks: list[str] = []
        """Events for the log of the run; the loop writes them and clears the list."""
        self.trainer_state = TrainerState()
        """Progress of the run, for the reward functions of the next responses."""
        self._batches = count()
        self._timeout_s = workers.generation_timeout_s
        self._scoring_s = ATTEMPTS * config.timeout_s + GRACE_S
        self.tokens = StepTokens(workers)
        """Calls that work on the tokens of complete groups."""

    def start(self) -> None:
        """Begin to start the environments and the workers."""
        self._workers.start()
        for actor, numbers in zip(self._workers.actors, self._workers.engines_of, strict=True):
            self._lost.watch(actor, numbers)

    def wait_ready(self) -> None:
        """Wait until every worker and its environments are up; RunError, which names the worker, if one fails."""
        self._workers.wait_ready()

    def plan(self, samples_per_prompt: int, settings: SamplingSettings, run_seed: int, step: int) -> RolloutPlan:
        """Make the plan of a generation batch, for `collect` and `begin`.

        The seed of a response comes from `run_seed`, `step`, the prompt's row, and the numbers of the sample and turn.

        Args:
            samples_per_prompt: responses to each prompt.
            settings: how tokens are drawn.
            run_seed: seed of the run.
            step: number of the generation batch.
        """
        return RolloutPlan(
            samples_per_prompt=samples_per_prompt,
            settings=settings,
            run_seed=run_seed,
            step=step,
            max_total_sequence_length=self._max_total_sequence_length,
            max_turns=self._max_turns,
            timeout_s=self._config.timeout_s,
            trainer_state=self.trainer_state,
        )

    def collect(self, prompts: Sequence[DatumSpec], plan: RolloutPlan, timer: StepTimer) -> list[SampledGroup]:
        """Sample responses to each prompt and score them.

        The time until the last response is sampled counts as "generation", the scoring after that as "environment".

        Returns:
            A group for each prompt, in the order of the prompts.

        Raises:
            SamplingError: an engine or an environment failed, or too many rollouts failed.
        """
        with timer.phase("generation"):
            under_way = self.begin(dict(enumerate(prompts)), plan)
        return self.finish(under_way, timer)

    def begin(self, prompts: Mapping[int, DatumSpec], plan: RolloutPlan) -> UnderWay:
        """Begin to sample and score, beside batches that are under way; then call `finish`, or `arrived` and `take`.

        Args:
            prompts: prompts by their number in the batch, in ascending order.
            plan: plan of the batch, from `RolloutPool.plan`.
        """
        self._lost.hand_on()
        batch = next(self._batches)
        parts = {n: part for n, part in enumerate(self._workers.shared_out(list(prompts.items()))) if part}
        workers = self._workers.actors
        calls = {
            number: workers[number].collect.options(num_returns="streaming").remote(batch, plan, part)
            for number, part in parts.items()
        }
        return UnderWay(batch, {number: workers[number].generated.remote(batch) for number in parts}, calls)

    def finish(self, under_way: UnderWay, timer: StepTimer) -> list[SampledGroup]:
        """Wait for all prompts of a batch; returns and raises the same as `collect`."""
        with timer.phase("generation"):
            limit = self._timeout_s + GRACE_S
            self._lost.wait(under_way.sampled, limit, "generation")
            self._workers.gather(under_way.sampled, limit, "generation")
        with timer.phase("environment"):
            complete = self.arrived([under_way])
            since = time.monotonic()
            while under_way.calls:
                self._wait([under_way], since, self._scoring_s, "scoring")
                complete += self.arrived([under_way])
            return self.take(sorted(complete))

    def arrived(self, batches: Sequence[UnderWay]) -> list[Complete]:
        """Return the prompts that have become complete since the last call, without waiting.

        Raises:
            SamplingError: an engine or an environment failed.
        """
        found = []
        for one in batches:
            for worker, call in list(one.calls.items()):
                while ray.wait([call], timeout=0)[0]:
                    try:
                        reference = next(call)
                    except StopIteration:
                        del one.calls[worker]
                        break
                    (numbers,) = self._workers.gather({worker: reference}, self._timeout_s, "generation")
                    found += [Complete(one.batch, number, worker) for number in numbers]
        return found

    def take(self, complete: Sequence[Complete]) -> list[SampledGroup]:
        """Fetch the groups of complete prompts, in this order; workers then forget them.

        Raises:
            SamplingError: a worker failed, or too many of the rollouts failed.
        """
        by_worker: dict[int, list[Complete]] = {}
        for one in complete:
            by_worker.setdefault(one.worker, []).append(one)
        calls = {
            worker: self._workers.actors[worker].hand_over.remote([(one.batch, one.number) for one in mine])
            for worker, mine in by_worker.items()
        }
        answers = self._workers.gather(calls, self._timeout_s, "handing over of rollouts")
        found: dict[Complete, SampledGroup] = {}
        for mine, collected in zip(by_worker.values(), answers, strict=True):
            self.remarks += collected.remarks
            found |= zip(mine, groups_of(collected), strict=True)
        groups = [found[one] for one in complete]
        outcomes = [one for group in groups for one in group.outcomes]
        try:
            require_few_failures(outcomes, self._config.max_failed_fraction)
        except SamplingError as error:  # a hanging engine misses rollout deadlines before the generation deadline
            engines = [ENGINE_NAME(number) for number in range(len(self._engines))]
            raise SamplingError(f"{error}{report_hanging(engines, 'generation')}") from None
        return groups

    def wait_for_groups(self, batches: Sequence[UnderWay], since: float) -> None:
        """Wait until `arrived` may return a prompt; engines that are lost meanwhile are replaced.

        Args:
            batches: all batches under way.
            since: time.monotonic() when the caller began to wait for groups, from which the deadlines of generation and
                scoring count.

        Raises:
            SamplingError: no group arrived within the deadline.
        """
        self._wait(batches, since, self._timeout_s + GRACE_S + self._scoring_s, "generation")

    def _wait(self, batches: Sequence[UnderWay], since: float, deadline_s: float, what: str) -> None:
        calls = [call for one in batches for call in one.calls.values()]
        over, replaced = self._lost.some(calls, since + deadline_s - time.monotonic())
        if not over and not replaced:
            late = sorted({worker for one in batches for worker in one.calls})
            raise SamplingError(str(overdue(what, [WORKER_NAME(worker) for worker in late], deadline_s)))

    def take_engine_counts(self) -> list[EngineCounts]:
        """Take each engine's counts since the last call; zeros for a failed engine, which its next request reports."""
        calls = [engine.take_counts.remote() for engine in self._engines]
        over, _ = ray.wait(calls, num_returns=len(calls), timeout=COUNTS_S)
        counts = []
        for call in calls:
            try:
                counts.append(ray.get(call) if call in over else EngineCounts())
            except RayError:
                counts.append(EngineCounts())
        return counts

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        self._workers.shutdown()
