"""The driver's handle of the rollout workers: prompts in, groups out, as outcomes and references to tokens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from megatron_grpo.batch.generation_requests import EngineCounts, SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.cluster.actor_calls import call_actor, stream_actor
from megatron_grpo.cluster.futures import build_overdue_error
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_names import ENGINE_NAME, WORKER_NAME
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import RolloutsConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.environments.environment_processes import EnvironmentPool
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.failures import require_few_failures
from megatron_grpo.rollouts.rollout import ATTEMPTS, RolloutSettings
from megatron_grpo.rollouts.rollout_worker import RolloutWorker
from megatron_grpo.rollouts.workers import RolloutWorkers

COUNTS_S = 20.0  # deadline for fetching the counts of all engines
GRACE_S = 20.0  # by which the driver's deadlines exceed those of workers, whose messages are more specific


RestoreEngines = Callable[[Mapping[int, str]], None]
"""Replaces lost engines, whose reasons it gets by engine number; SamplingError: it cannot."""


def refuse_to_restore(lost_engines: Mapping[int, str]) -> None:
    """Raise SamplingError with the reasons, as a `RestoreEngines` that cannot."""
    raise SamplingError("; ".join(dict.fromkeys(lost_engines.values())))


class EngineReplacer:
    """Replaces the engines that rollout workers report as lost.

    `restore` puts the new actors into the list `engines`, in place of the lost ones.
    """

    def __init__(self, engines: Sequence[Any], restore: RestoreEngines) -> None:
        self._engines, self._restore = engines, restore
        self._announced = list(engines)  # the actors that workers use
        self._restarts = [0] * len(engines)
        self._workers: list[tuple[Any, Sequence[int]]] = []  # each with the numbers of its engines
        self._reports: dict[Any, Any] = {}  # open calls of `wait_for_losses`, each with its worker

    def watch(self, worker: Any, numbers: Sequence[int]) -> None:
        """Listen to the reports of a worker that uses these engines."""
        self._workers.append((worker, numbers))
        self._reports[call_actor(worker, RolloutWorker.wait_for_losses)] = worker

    def announce_replacements(self) -> None:
        """Tell workers about replaced engines, such as those of a refit."""
        for number, actor in enumerate(self._engines):
            if actor is not self._announced[number]:
                self._announced[number] = actor
                self._restarts[number] += 1
                for worker in self._list_workers(number):
                    call_actor(worker, RolloutWorker.replace_engine, number, actor)

    def wait_for_call(self, calls: Sequence[Any], timeout_s: float) -> Any | None:
        """Return the next ended call, None after lost engines; raises TimeoutError."""
        # Reports are open calls like any other, so one wait notices both.
        self.announce_replacements()
        ready, _ = ray.wait([*calls, *self._reports], num_returns=1, timeout=max(timeout_s, 0.0))
        if not ready:
            raise TimeoutError
        if ready[0] not in self._reports:
            return ready[0]
        worker, lost_engines = self._reports.pop(ready[0]), {}
        with suppress(RayError):  # if the worker died, its other calls raise the error
            losses = ray.get(ready[0])
            self._reports[call_actor(worker, RolloutWorker.wait_for_losses)] = worker
            # Another worker may have reported the loss, and the engine may be replaced already.
            lost_engines = {
                number: loss.reason for number, loss in losses.items() if loss.restarts == self._restarts[number]
            }
        try:
            if lost_engines:
                self._restore(lost_engines)
        except SamplingError as error:
            for number in lost_engines:
                for user in self._list_workers(number):
                    call_actor(user, RolloutWorker.give_up_engine, number, str(error))
        self.announce_replacements()
        return None

    def _list_workers(self, engine: int) -> list[Any]:
        return [worker for worker, numbers in self._workers if engine in numbers]


class CompletePrompt(NamedTuple):
    """A prompt whose group is complete and can be taken.

    Example: CompletePrompt(batch=3, number=12, worker=0)
    """

    batch: int  # number of the batch in which the prompt was begun
    number: int  # number of the prompt, as given to `RolloutPool.begin`
    worker: int  # number of the rollout worker that has the group


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """Prompts that `RolloutPool.begin` has begun.

    Example: of batch 3, whose prompts two workers share:
        PendingBatch(3, sampled={0: ref_a, 1: ref_b}, streams={stream_a: 0, stream_b: 1})
    """

    number: int  # unique
    sampled: dict[int, Any]  # by worker, a reference that is ready when all its responses are sampled
    streams: dict[Any, int]
    """Ray generators of lists of complete prompts' numbers, each with its worker; removed when the worker is done."""

    def is_done(self) -> bool:
        """True once all prompts are scored or have failed."""
        ends = [stream.completed() for stream in self.streams]
        return len(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) == len(ends) if ends else True


class RolloutPool(RolloutWorkers):
    """The driver's handle of the rollout workers."""

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
            engines: Ray actors (`Engine`), in the order of their numbers; empty: nothing is sampled.
            environments: pools of environment processes by task name, not yet started.
            generation_timeout_s: deadline for sampling one generation batch, and for each call on its tokens.
            routed: form of the experts that engines return; None: engines return none.
            restore: replaces lost engines in `engines` in place, or raises SamplingError.
        """
        super().__init__(config.num_workers, engines, environments, generation_timeout_s, routed, endpoint)
        self._config = config
        self._replacer = EngineReplacer(engines, restore)
        self._max_total_sequence_length = max_total_sequence_length
        self._max_turns = max_turns
        self.remarks: list[str] = []  # for the log of the run; the loop writes them and clears the list
        self.trainer_state = TrainerState()  # for the reward functions of the next responses
        self._batches = count()
        self._scoring_s = ATTEMPTS * config.timeout_s + GRACE_S

    def start(self) -> None:
        super().start()
        for worker, numbers in zip(self.actors, self._engine_numbers, strict=True):
            self._replacer.watch(worker, numbers)

    def make_settings(
        self, samples_per_prompt: int, sampling: SamplingSettings, run_seed: int, generation_batch: int
    ) -> RolloutSettings:
        return RolloutSettings(
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            run_seed=run_seed,
            generation_batch=generation_batch,
            max_total_sequence_length=self._max_total_sequence_length,
            max_turns=self._max_turns,
            timeout_s=self._config.timeout_s,
            trainer_state=self.trainer_state,
        )

    def collect(self, prompts: Sequence[DatumSpec], settings: RolloutSettings, timer: StepTimer) -> list[SampledGroup]:
        """Sample and score responses; returns a group for each prompt.

        The time until the last response is sampled counts as "generation", the scoring after that as "environment".
        SamplingError if an engine or an environment failed, or too many rollouts.
        """
        with timer.phase("generation"):
            batch = self.begin(dict(enumerate(prompts)), settings)
        return self.finish(batch, timer)

    def begin(self, prompts: Mapping[int, DatumSpec], settings: RolloutSettings) -> PendingBatch:
        """Begin a batch of prompts by number, ascending, for `finish` or `take`."""
        # A refit may have replaced engines since the last batch; requests to the old actors would fail.
        self._replacer.announce_replacements()
        batch, numbered = next(self._batches), list(prompts.items())
        # Workers get prompts in proportion to their engines. Rounding the bounds, not the sizes, gives every prompt to
        # exactly one worker.
        bounds = [round(len(numbered) * share) for share in np.cumsum([0.0, *self._shares]).tolist()]
        parts = {worker: numbered[begin:end] for worker, (begin, end) in enumerate(pairwise(bounds)) if begin < end}
        streams = {
            stream_actor(self.actors[worker], RolloutWorker.collect, batch, settings, part): worker
            for worker, part in parts.items()
        }
        sampled = {worker: call_actor(self.actors[worker], RolloutWorker.wait_sampled, batch) for worker in parts}
        return PendingBatch(batch, sampled, streams)

    def finish(self, batch: PendingBatch, timer: StepTimer) -> list[SampledGroup]:
        """Wait for a batch; returns and raises the same as `collect`."""
        with timer.phase("generation"), phase("generation"):
            limit, since = self._timeout_s + GRACE_S, time.monotonic()
            pending = {call: worker for worker, call in batch.sampled.items()}
            while pending:
                call = self._wait_for_call(pending, since, limit, "generation")
                if call is None:
                    since = time.monotonic()  # rollouts on a new engine have the whole deadline
                else:
                    del pending[call]
            self._gather(batch.sampled, limit, "generation")
        with timer.phase("environment"):
            complete = self.list_complete([batch])
            since = time.monotonic()
            # Scoring has a deadline of its own, which begins when the last response is sampled.
            while batch.streams:
                self._wait_for_call(batch.streams, since, self._scoring_s, "scoring")
                complete += self.list_complete([batch])
            return self.take(sorted(complete))

    def list_complete(self, batches: Sequence[PendingBatch]) -> list[CompletePrompt]:
        """Return newly complete prompts, without waiting; SamplingError if an engine or environment failed."""
        complete: list[CompletePrompt] = []
        streams = {stream: (batch, worker) for batch in batches for stream, worker in batch.streams.items()}
        # One wait for all workers, since this is called for every prompt or two that become complete.
        while streams and (ready := ray.wait(list(streams), num_returns=len(streams), timeout=0)[0]):
            for stream in ready:
                batch, worker = streams[stream]
                try:
                    reference = next(stream)
                except StopIteration:
                    del batch.streams[stream], streams[stream]
                    continue
                (numbers,) = self._gather({worker: reference}, self._timeout_s, "generation")
                complete += [CompletePrompt(batch.number, number, worker) for number in numbers]
        return complete

    def take(self, complete: Sequence[CompletePrompt]) -> list[SampledGroup]:
        """Take the groups of prompts from workers; SamplingError if too many failed."""
        by_worker: defaultdict[int, list[CompletePrompt]] = defaultdict(list)
        for prompt in complete:
            by_worker[prompt.worker].append(prompt)
        # One call for all prompts of a worker, so that it can pack small groups into common objects.
        calls = {
            worker: call_actor(
                self.actors[worker], RolloutWorker.hand_over, [(prompt.batch, prompt.number) for prompt in prompts]
            )
            for worker, prompts in by_worker.items()
        }
        answers = self._gather(calls, self._timeout_s, "handing over of rollouts")
        group_of: dict[CompletePrompt, SampledGroup] = {}
        for prompts, (packed, remarks) in zip(by_worker.values(), answers, strict=True):
            self.remarks += remarks
            group_of |= zip(prompts, packed.unpack(), strict=True)
        groups = [group_of[prompt] for prompt in complete]
        try:
            outcomes = [outcome for group in groups for outcome in group.outcomes]
            require_few_failures(outcomes, self._config.max_failed_fraction)
        except SamplingError as error:  # the cause may be an engine that hangs: rollouts have shorter deadlines
            engines = [ENGINE_NAME(number) for number in range(len(self.engines))]
            raise SamplingError(f"{error}{report_hanging(engines, 'generation')}") from None
        return groups

    def wait_for_groups(self, batches: Sequence[PendingBatch], since: float) -> None:
        """Wait until `list_complete` may return a prompt; deadlines count from `since`."""
        streams = {stream: worker for batch in batches for stream, worker in batch.streams.items()}
        self._wait_for_call(streams, since, self._timeout_s + GRACE_S + self._scoring_s, "generation")

    def _wait_for_call(self, calls: Mapping[Any, int], since: float, deadline_s: float, phase_name: str) -> Any | None:
        """Wait until a call, given with its worker, ends; None: lost engines were replaced."""
        try:
            return self._replacer.wait_for_call(list(calls), since + deadline_s - time.monotonic())
        except TimeoutError:
            workers = [WORKER_NAME(worker) for worker in sorted(set(calls.values()))]
            raise SamplingError(str(build_overdue_error(phase_name, workers, deadline_s))) from None

    def take_engine_counts(self) -> list[EngineCounts]:
        # A failed engine has zeros; its next request reports the failure.
        calls = [call_actor(engine, Engine.take_counts) for engine in self.engines]
        ended = set(ray.wait(calls, num_returns=len(calls), timeout=COUNTS_S)[0])
        counts = []
        for call in calls:
            try:
                counts.append(ray.get(call) if call in ended else EngineCounts())
            except RayError:
                counts.append(EngineCounts())
        return counts
