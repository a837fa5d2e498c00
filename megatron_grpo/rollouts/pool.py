"""The driver's handle of the rollout workers: prompts in, groups out, as outcomes and references to tokens."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from megatron_grpo.batch.generation_requests import EngineCounts, SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.cluster.actor_calls import Method, call_actor, stream_actor
from megatron_grpo.cluster.futures import build_overdue_error
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import ENGINE_NAME, WORKER_NAME
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import RolloutsConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.environments.environment_processes import EnvironmentPool
from megatron_grpo.environments.interface import STARTUP_S
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.engine_replacer import EngineReplacer, RestoreEngines, refuse_to_restore
from megatron_grpo.rollouts.failures import require_few_failures
from megatron_grpo.rollouts.rollout import ATTEMPTS, RolloutSettings
from megatron_grpo.rollouts.rollout_worker import RolloutWorker
from megatron_grpo.rollouts.token_store import TokenStore

ENGINES_PER_WORKER = 8
CLOCK_S = 60.0  # deadline for stopping all clocks, or starting them again
ABANDON_S = 60.0  # deadline for ending all rollouts under way
REBALANCE_S = 60.0  # deadline for telling all workers about added and leaving engines
COUNTS_S = 20.0  # deadline for fetching the counts of all engines
GRACE_S = 20.0  # by which the driver's deadlines exceed those of workers, whose messages are more specific


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
    streams: dict[Any, int]  # Ray generators of lists of complete prompts, each with its worker; removed when it ends

    def is_done(self) -> bool:
        """True once all prompts are scored or have failed."""
        ends = [stream.completed() for stream in self.streams]
        return len(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) == len(ends) if ends else True


@dataclass(eq=False)
class RolloutPool(TokenStore):
    """The driver's handle of the rollout workers."""

    config: RolloutsConfig
    engines: Mapping[int, Any]  # Ray actors (`Engine`), by number; empty: nothing is sampled
    environments: Mapping[str, EnvironmentPool]  # by task name, not yet started
    _: KW_ONLY
    max_total_sequence_length: int
    max_turns: int = 1
    endpoint: EndpointSettings | None = None
    restore: RestoreEngines = refuse_to_restore  # replaces lost engines in `engines` in place, or raises SamplingError
    finished_folder: Path | None = None  # where workers keep finished samples of training; None: nowhere

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shares: list[float] = []  # of the prompts, by worker
        self._starting: dict[int, Any] = {}
        self._started_at = 0.0
        self._replacer = EngineReplacer(self.engines, self.restore)
        self.remarks: list[str] = []  # for the log of the run; the loop writes them and clears the list
        self.trainer_state = TrainerState()  # for the reward functions of the next responses
        self._batches = count()
        self._scoring_s = 2 * ATTEMPTS * self.config.timeout_s + GRACE_S  # the second half looks for culprits

    def start(self) -> None:
        self._started_at = time.monotonic()
        workers = self.config.num_workers or max(1, round(len(self.engines) / ENGINES_PER_WORKER))
        handles = {name: environment.start(workers) for name, environment in self.environments.items()}
        engine_numbers = self._divide_engines(workers)
        actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(RolloutWorker)
        for index, numbers in enumerate(engine_numbers):
            endpoint = self.endpoint
            if endpoint is not None and endpoint.port:  # workers listen on consecutive ports
                endpoint = replace(endpoint, port=endpoint.port + index)
            worker = actor.remote(
                index,
                engines={number: self.engines[number] for number in numbers},
                environments={name: by_worker[index] for name, by_worker in handles.items()},
                generation_timeout_s=self.generation_timeout_s,
                endpoint=endpoint,
            )
            self.actors.append(worker)
        self._starting = self._call_all(RolloutWorker.start)
        for worker in self.actors:
            self._replacer.watch(worker)

    def _divide_engines(self, workers: int) -> list[list[int]]:
        """Divide engines and prompts among workers."""
        numbers = sorted(self.engines.keys() - self.leaving)
        engines = len(numbers)
        # Each worker gets neighbouring engines; with more workers than engines, workers share engines.
        starts = [engines * worker // workers for worker in range(workers + 1)]
        divided = [numbers[begin : max(end, begin + 1)] for begin, end in pairwise(starts)]
        # A worker's share of the prompts is that of its engines; an engine of several workers counts in parts.
        users = Counter(chain.from_iterable(divided))
        shares = [sum(1 / users[engine] for engine in numbers) for numbers in divided]
        self._shares = [share / max(engines, 1) for share in shares]
        return divided

    @property
    def leaving(self) -> set[int]:
        """Numbers of engines that get no more rollouts."""
        return self._replacer.leaving

    def share_engines(self) -> None:
        """Divide engines anew, after some came or leave."""
        engines = self._replacer.list_used()
        calls = {
            worker: call_actor(self.actors[worker], RolloutWorker.use_engines, {key: engines[key] for key in numbers})
            for worker, numbers in enumerate(self._divide_engines(len(self.actors)))
        }
        self._gather(calls, REBALANCE_S, "division of the engines")

    def hand_back(self, engine: int) -> None:
        """Let others begin an engine's rollouts again."""
        self._replacer.hand_back(engine)

    def forget_idle_engines(self) -> dict[int, int]:
        """Forget idle leaving engines; count the others' rollouts."""
        unfinished: Counter[int] = Counter()
        calls = self._call_all(RolloutWorker.forget_idle_engines)
        for counts in self._gather(calls, REBALANCE_S, "end of rollouts on leaving engines"):
            unfinished.update({number: rollouts for number, rollouts in counts.items() if number in self.leaving})
        self.leaving.intersection_update(unfinished)
        return dict(unfinished)

    def wait_ready(self) -> None:
        """Wait until workers and environments are up; RunError after STARTUP_S."""
        remaining_s = STARTUP_S - (time.monotonic() - self._started_at)
        self._gather(self._starting, max(remaining_s, 0.0), "start of rollouts")

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for worker in self.actors:
            ray.kill(worker)
        self.actors = []

    def abandon(self) -> None:
        """End all rollouts under way: a restart begins their prompts again."""
        self._gather(self._call_all(RolloutWorker.abandon), ABANDON_S, "ending the rollouts under way")
        if self.engines:
            self.take_engine_counts()  # of steps that do not count

    def stop_clocks(self) -> None:
        """Stop the deadlines of rollouts: the engines go to sleep."""
        self._gather(self._call_all(RolloutWorker.stop_clock), CLOCK_S, "stop of deadlines")

    def restart_clocks(self) -> None:
        """Let the deadlines of rollouts go on: the engines are awake."""
        self._gather(self._call_all(RolloutWorker.restart_clock), CLOCK_S, "restart of deadlines")

    def make_settings(
        self, samples_per_prompt: int, sampling: SamplingSettings, run_seed: int, generation_batch: int
    ) -> RolloutSettings:
        """Make the settings of a generation batch; validations have the number 0."""
        return RolloutSettings(
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            run_seed=run_seed,
            generation_batch=generation_batch,
            max_total_sequence_length=self.max_total_sequence_length,
            max_turns=self.max_turns,
            timeout_s=self.config.timeout_s,
            trainer_state=self.trainer_state,
            finished_folder=self.finished_folder if generation_batch else None,
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
            limit, since = self.generation_timeout_s + GRACE_S, time.monotonic()
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
                (numbers,) = self._gather({worker: reference}, self.generation_timeout_s, "generation")
                complete += [CompletePrompt(batch.number, number, worker) for number in numbers]
        return complete

    def take(self, complete: Sequence[CompletePrompt]) -> list[SampledGroup]:
        """Take the groups of prompts from workers; SamplingError if too many failed."""
        by_worker: defaultdict[int, list[CompletePrompt]] = defaultdict(list)
        for prompt in complete:
            by_worker[prompt.worker].append(prompt)
        # One call for all prompts of a worker, so that it can pack small groups into common objects.
        calls: dict[int, Any] = {}
        for worker, prompts in by_worker.items():
            numbers = [(prompt.batch, prompt.number) for prompt in prompts]
            calls[worker] = call_actor(self.actors[worker], RolloutWorker.hand_over, numbers)
        answers = self._gather(calls, self.generation_timeout_s, "handing over of rollouts")
        group_of: dict[CompletePrompt, SampledGroup] = {}
        for prompts, (packed, remarks) in zip(by_worker.values(), answers, strict=True):
            self.remarks += remarks
            group_of |= zip(prompts, packed.unpack(), strict=True)
        groups = [group_of[prompt] for prompt in complete]
        try:
            outcomes = [outcome for group in groups for outcome in group.outcomes]
            require_few_failures(outcomes, self.config.max_failed_fraction)
        except SamplingError as error:  # the cause may be an engine that hangs: rollouts have shorter deadlines
            engines = [*map(ENGINE_NAME, self.engines)]
            raise SamplingError(f"{error}{report_hanging(engines, 'generation')}") from None
        return groups

    def wait_for_groups(self, batches: Sequence[PendingBatch], since: float) -> None:
        """Wait until a call of a worker ends; raise SamplingError `generation_timeout_s` after `since`."""
        streams = {stream: worker for batch in batches for stream, worker in batch.streams.items()}
        self._wait_for_call(streams, since, self.generation_timeout_s + GRACE_S + self._scoring_s, "generation")

    def _wait_for_call(self, calls: Mapping[Any, int], since: float, deadline_s: float, phase_name: str) -> Any | None:
        """Wait until a call, given with its worker, ends; None: lost engines were replaced."""
        try:
            return self._replacer.wait_for_call(list(calls), since + deadline_s - time.monotonic())
        except TimeoutError:
            workers = [WORKER_NAME(worker) for worker in sorted(set(calls.values()))]
            raise SamplingError(str(build_overdue_error(phase_name, workers, deadline_s))) from None

    def take_engine_counts(self) -> dict[int, EngineCounts]:
        """Take the counts of each engine, by number."""
        # A failed engine has zeros; its next request reports the failure.
        calls = {number: call_actor(engine, Engine.take_counts) for number, engine in self.engines.items()}
        ended = set(ray.wait([*calls.values()], num_returns=len(calls), timeout=COUNTS_S)[0])
        counts = {}
        for number, call in calls.items():
            try:
                counts[number] = ray.get(call) if call in ended else EngineCounts()
            except RayError:
                counts[number] = EngineCounts()
        return counts

    def _call_all(self, method: Method[[]]) -> dict[int, Any]:
        return {number: call_actor(worker, method) for number, worker in enumerate(self.actors)}
