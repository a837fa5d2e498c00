"""The rollout workers as the driver sees them: prompts in, groups out; the driver holds outcomes and references."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, cast

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
from megatron_grpo.sampler.worker_group import (
    WORKER_NAME,
    LostEngines,
    Restore,
    WorkerGroup,
    not_replaced,
)

COUNTS_S = 20.0
"""Deadline of all answers together."""


def take_counts(engines: Sequence[Any]) -> list[EngineCounts]:
    """The counts of each engine (an actor) since the last call; those of one that fails or is late are zeros."""
    calls = [engine.take_counts.remote() for engine in engines]
    over, _ = ray.wait(calls, num_returns=len(calls), timeout=COUNTS_S)
    return [_counts(call) if call in over else EngineCounts() for call in calls]


def _counts(call: Any) -> EngineCounts:
    try:
        return cast(EngineCounts, ray.get(call))
    except RayError:
        return EngineCounts()


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A generation batch that `RolloutPool.begin` has begun, for `RolloutPool.finish`."""

    generated: list[Any]
    """By worker, a reference that is there when its responses are."""
    collected: list[Any]
    """By worker, a reference to its groups."""

    def is_done(self) -> bool:
        """Whether everything is sampled and scored, or has failed."""
        return len(ray.wait(self.collected, num_returns=len(self.collected), timeout=0)[0]) == len(self.collected)


class Complete(NamedTuple):
    """A prompt whose group is complete, and waits to be taken."""

    number: int
    """By which the driver knows the prompt."""
    worker: int
    """Number of the rollout worker that has the group."""


class GroupStream:
    """What rollout workers yield of some prompts (`RolloutWorker.collect_each`)."""

    def __init__(self, calls: dict[int, Any]) -> None:
        """
        Args:
            calls: by number of the worker, a generator (Ray's) of references to numbers of prompts.
        """
        self.calls = calls
        """Those that are not over."""

    def arrived(self, get: Callable[[int, Any], list[int]]) -> list[Complete]:
        """What has become complete since the last call, without waiting.

        Args:
            get: (number of the worker, reference) -> what it refers to.
        """
        found = []
        for worker, call in list(self.calls.items()):
            while ray.wait([call], timeout=0)[0]:
                try:
                    reference = next(call)
                except StopIteration:
                    del self.calls[worker]
                    break
                found += [Complete(number, worker) for number in get(worker, reference)]
        return found


GRACE_S = 20.0
"""What the driver waits longer than the workers do, whose messages say more and come once the stacks are read."""


class RolloutPool:
    """Rollout workers in Ray actors. `start()` returns at once; then `wait_ready()`."""

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
            config: how long a rollout may take and how many may fail.
            workers: the rollout workers, not yet started.
            max_total_sequence_length: longest prompt plus responses in tokens.
            max_turns: most responses of one rollout.
            restore: replaces lost engines in `workers.engines` itself, and raises SamplingError if it does not.
        """
        self._config, self._workers = config, workers
        self._engines = workers.engines
        self._lost = LostEngines(workers.engines, restore)
        self._max_total_sequence_length = max_total_sequence_length
        self._max_turns = max_turns
        self.remarks: list[str] = []
        """Events for the log of the run; the loop writes them and clears the list."""
        self.trainer_state = TrainerState()
        """How far the run is: what reward functions are told of the responses that are asked for next."""
        self._batches = count()
        self._timeout_s = workers.generation_timeout_s
        self.tokens = StepTokens(workers)
        """What the workers do with the tokens of groups that are complete."""

    def start(self) -> None:
        """Begin to start the environments and the workers."""
        self._workers.start()
        for actor, numbers in zip(self._workers.actors, self._workers.engines_of, strict=True):
            self._lost.watch(actor, numbers)

    def wait_ready(self) -> None:
        """Return when every worker and its environments are up.

        Raises:
            RunError: one is not; says which and why.
        """
        self._workers.wait_ready()

    def collect(
        self,
        prompts: Sequence[DatumSpec],
        *,
        samples_per_prompt: int,
        settings: SamplingSettings,
        run_seed: int,
        step: int,
        timer: StepTimer,
    ) -> list[SampledGroup]:
        """Sample `samples_per_prompt` responses to each prompt, and have them scored.

        `run_seed`, `step`, the prompt's row and the sample's number decide what is drawn. The time until the last
        response is there is counted as "generation", and what scoring takes beyond it as "environment".

        Returns:
            A group for each prompt, in their order.

        Raises:
            SamplingError: an engine or an environment failed, or too many rollouts did.
        """
        with timer.phase("generation"):
            under_way = self.begin(
                prompts, samples_per_prompt=samples_per_prompt, settings=settings, run_seed=run_seed, step=step
            )
        return self.finish(under_way, timer)

    def begin(
        self,
        prompts: Sequence[DatumSpec],
        *,
        samples_per_prompt: int,
        settings: SamplingSettings,
        run_seed: int,
        step: int,
    ) -> UnderWay:
        """Begin what `collect` does, beside whatever is under way already; `finish` returns what comes of it."""
        plan = self._plan(samples_per_prompt=samples_per_prompt, settings=settings, run_seed=run_seed, step=step)
        self._lost.hand_on()
        batch = next(self._batches)
        parts = self._workers.shared_out(list(enumerate(prompts)))
        collected = [
            worker.collect.remote(batch, plan, part) for worker, part in zip(self._workers.actors, parts, strict=True)
        ]
        return UnderWay([worker.generated.remote(batch) for worker in self._workers.actors], collected)

    def finish(self, under_way: UnderWay, timer: StepTimer) -> list[SampledGroup]:
        """Wait for a generation batch that was begun; returns and raises what `collect` does."""
        with timer.phase("generation"):
            limit = self._timeout_s + GRACE_S
            self._lost.wait(under_way.generated, limit, "generation", WORKER_NAME)
            self._workers.gather(under_way.generated, limit, "generation")
        with timer.phase("environment"):
            answers = self._workers.gather(under_way.collected, self._scoring_s, "scoring")
        self.remarks += [text for collected in answers for text in collected.remarks]
        groups = [group for collected in answers for group in groups_of(collected)]
        self._require_few_failures(groups)
        return groups

    def begin_each(
        self,
        prompts: Mapping[int, DatumSpec],
        *,
        samples_per_prompt: int,
        settings: SamplingSettings,
        run_seed: int,
        step: int,
    ) -> GroupStream:
        """As `begin`, for prompts that are waited for one by one (`arrived`).

        Args:
            prompts: by a number that the caller knows each by.
            samples_per_prompt: responses to each.
            settings: how tokens are drawn.
            run_seed: seed of the run.
            step: number of the generation batch, for the seeds.
        """
        plan = self._plan(samples_per_prompt=samples_per_prompt, settings=settings, run_seed=run_seed, step=step)
        self._lost.hand_on()
        parts = self._workers.shared_out(list(prompts.items()))
        workers = self._workers.actors
        return GroupStream(
            {
                number: workers[number].collect_each.options(num_returns="streaming").remote(plan, part)
                for number, part in enumerate(parts)
                if part
            }
        )

    def arrived(self, streams: Sequence[GroupStream]) -> list[Complete]:
        """Prompts that have become complete since the last call; without waiting.

        Raises:
            SamplingError: an engine or an environment failed.
        """
        return [one for stream in streams for one in stream.arrived(self._numbers)]

    def take(self, complete: Sequence[Complete]) -> list[SampledGroup]:
        """The groups of prompts that are complete, in this order.

        Raises:
            SamplingError: a worker failed, or too many of the rollouts did.
        """
        numbers: dict[int, list[int]] = {}
        for one in complete:
            numbers.setdefault(one.worker, []).append(one.number)
        calls = {worker: self._workers.actors[worker].hand_over.remote(mine) for worker, mine in numbers.items()}
        answers = [
            self._workers.gather([call], self._timeout_s, "handing over of rollouts", worker)[0]
            for worker, call in calls.items()
        ]
        self.remarks += [text for collected in answers for text in collected.remarks]
        found = {
            number: group
            for mine, collected in zip(numbers.values(), answers, strict=True)
            for number, group in zip(mine, groups_of(collected), strict=True)
        }
        groups = [found[one.number] for one in complete]
        self._require_few_failures(groups)
        return groups

    def wait_for_groups(self, streams: Sequence[GroupStream], since: float) -> None:
        """Return when `arrived` may have something new; engines that are lost meanwhile are replaced.

        Args:
            streams: what is under way.
            since: when the caller began to wait for groups, on the clock of time.monotonic(): the deadlines of
                generation and of scoring count from there.

        Raises:
            SamplingError: nothing has come within the deadline.
        """
        deadline_s = self._timeout_s + GRACE_S + self._scoring_s
        calls = [call for stream in streams for call in stream.calls.values()]
        over, replaced = self._lost.some(calls, since + deadline_s - time.monotonic())
        if not over and not replaced:
            late = sorted({worker for stream in streams for worker in stream.calls})
            raise SamplingError(str(overdue("generation", [WORKER_NAME(worker) for worker in late], deadline_s)))

    def _require_few_failures(self, groups: Sequence[SampledGroup]) -> None:
        """Nothing, as long as few enough rollouts failed; otherwise SamplingError."""
        outcomes = [one for group in groups for one in group.outcomes]
        try:
            require_few_failures(outcomes, self._config.max_failed_fraction)
        except SamplingError as error:  # an engine that hangs is late for its rollouts before the generation is
            engines = [ENGINE_NAME(number) for number in range(len(self._engines))]
            raise SamplingError(f"{error}{report_hanging(engines, 'generation')}") from None

    def take_engine_counts(self) -> list[EngineCounts]:
        """Counts of each engine since the last call; zeros for one that fails, which its next request reports."""
        return take_counts(self._engines)

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        self._workers.shutdown()

    @property
    def _scoring_s(self) -> float:
        """Deadline of what comes after the last response."""
        return ATTEMPTS * self._config.timeout_s + GRACE_S

    def _plan(self, *, samples_per_prompt: int, settings: SamplingSettings, run_seed: int, step: int) -> RolloutPlan:
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

    def _numbers(self, worker: int, reference: Any) -> list[int]:
        """What a worker has yielded."""
        (numbers,) = self._workers.gather([reference], self._timeout_s, "generation", worker)
        return list(numbers)
