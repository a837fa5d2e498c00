"""The rollout workers as the driver sees them: prompts in, groups out; the driver holds outcomes and references."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from megatron_grpo.cluster.futures import explain, gather
from megatron_grpo.cluster.late import report_hanging
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.rollout_schema import RolloutsConfig
from megatron_grpo.data.engine_counts import EngineCounts
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.rollout_files import rollouts_file
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.data.trajectory import SampledGroup, Trajectory
from megatron_grpo.models.routed import RoutedForm
from megatron_grpo.rollouts.dump import LearntFrom
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.engines import ENGINE_NAME
from megatron_grpo.rollouts.environment_client import EnvironmentProcesses
from megatron_grpo.rollouts.failures import require_few_failures
from megatron_grpo.rollouts.lost_engines import LostEngines, Restore, not_replaced
from megatron_grpo.rollouts.payloads import Bundler, Payloads
from megatron_grpo.rollouts.rollout import ATTEMPTS, RolloutPlan
from megatron_grpo.rollouts.shards import evenly_chosen, places_of, shard_fields
from megatron_grpo.rollouts.worker import Compute, RolloutWorker, ShardRefs, WorkerSettings

if TYPE_CHECKING:
    from megatron_grpo.data.batch import StepBatch

ENGINES_PER_WORKER = 8
WORKER_NAME = "rollout worker {}".format
ACTOR_OPTIONS: Mapping[str, Any] = {"num_cpus": 0}
COUNTS_S = 20.0
"""Deadline for the engines' statistics, which nothing depends on."""
GRACE_S = 20.0
"""What the driver waits longer than the workers do, whose messages say more and come once the stacks are read."""


class StartableEnvironment(Protocol):
    """An environment whose processes are shared out over rollout workers (`EnvironmentPool`)."""

    def start(self, shares: int) -> Sequence[EnvironmentProcesses]: ...


class Timer(Protocol):
    """Names the phase that time is spent in."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


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


class RolloutPool:
    """Rollout workers in Ray actors. `start()` returns at once; then `wait_ready()`."""

    def __init__(
        self,
        config: RolloutsConfig,
        engines: Sequence[Any],
        environments: Mapping[str, StartableEnvironment],
        *,
        max_total_sequence_length: int,
        max_turns: int = 1,
        generation_timeout_s: float,
        startup_timeout_s: float = 900.0,
        actor_options: Mapping[str, Any] = ACTOR_OPTIONS,
        routed: RoutedForm | None = None,
        endpoint: EndpointSettings | None = None,
        restore: Restore = not_replaced,
    ) -> None:
        """
        Args:
            config: how many workers, how long a rollout may take and how many may fail.
            engines: Ray actors with `generate` and `abort`, in the order of their numbers.
            environments: by task name; `start` is called on each.
            max_total_sequence_length: longest prompt plus responses in tokens.
            max_turns: most responses of one rollout.
            generation_timeout_s: deadline for the sampling of one generation batch.
            startup_timeout_s: deadline of `wait_ready`, counted from `start`, and for the start of each process that
                replaces another.
            actor_options: Ray options (resources, placement) of every worker.
            routed: what the experts look like that engines return; None: they do not.
            endpoint: where agents ask the model, at the first worker; None: nobody does.
            restore: replaces engines that are lost, in `engines` itself, and raises SamplingError if it does not.
        """
        self._config = config
        self._engines = engines
        self._lost = LostEngines(engines, restore)
        self._environments = environments
        self._max_total_sequence_length = max_total_sequence_length
        self._max_turns = max_turns
        self._generation_timeout_s = generation_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._actor_options = dict(actor_options)
        self._routed, self._endpoint = routed, endpoint
        self.remarks: list[str] = []
        """What somebody who watches the run should hear of; whoever tells it clears it."""
        self.trainer_state = TrainerState()
        """How far the run is: what reward functions are told of the responses that are asked for next."""
        self._batches = count()
        self._turn = count()
        self._workers: list[Any] = []
        self._shares: list[float] = []
        self._starting: list[Any] = []
        self._started_at = 0.0

    def start(self) -> None:
        """Begin to start the environments and the workers."""
        self._started_at = time.monotonic()
        engines = len(self._engines)
        workers = self._config.num_workers or max(1, round(engines / ENGINES_PER_WORKER))
        handles = {name: one.start(workers) for name, one in self._environments.items()}
        # Neighbouring engines to each worker; with more workers than engines, some share one.
        starts = [engines * worker // workers for worker in range(workers + 1)]
        owned = [range(begin, max(end, begin + 1)) for begin, end in pairwise(starts)]
        users = [sum(engine in one for one in owned) for engine in range(engines)]
        self._shares = [sum(1 / users[engine] for engine in one) / engines for one in owned]
        actor = ray.remote(**self._actor_options)(RolloutWorker)
        for index, numbers in enumerate(owned):
            settings = WorkerSettings(
                index=index,
                engines={number: self._engines[number] for number in numbers},
                environments={name: shares[index] for name, shares in handles.items()},
                generation_timeout_s=self._generation_timeout_s,
                startup_timeout_s=self._startup_timeout_s,
                routed=self._routed,
                endpoint=None if self._endpoint is None else self._endpoint.of_worker(index),
            )
            self._workers.append(actor.remote(settings))
            self._lost.watch(self._workers[-1], numbers)
        self._starting = [worker.ready.remote() for worker in self._workers]

    def wait_ready(self) -> None:
        """Return when every worker and its environments are up.

        Raises:
            RunError: one is not; says which and why.
        """
        left = self._startup_timeout_s - (time.monotonic() - self._started_at)
        self._gather(self._starting, max(left, 0.0), "start of rollouts")

    def collect(
        self,
        prompts: Sequence[DatumSpec],
        *,
        samples_per_prompt: int,
        settings: SamplingSettings,
        run_seed: int,
        step: int,
        timer: Timer,
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
        plan = RolloutPlan(
            samples_per_prompt=samples_per_prompt,
            settings=settings,
            run_seed=run_seed,
            step=step,
            max_total_sequence_length=self._max_total_sequence_length,
            max_turns=self._max_turns,
            timeout_s=self._config.timeout_s,
            trainer_state=self.trainer_state,
        )
        self._lost.hand_on()
        batch = next(self._batches)
        numbered = list(enumerate(prompts))
        bounds = [round(len(prompts) * share) for share in np.cumsum([0.0, *self._shares]).tolist()]
        parts = list(pairwise(bounds))
        collected = [
            worker.collect.remote(batch, plan, numbered[begin:end])
            for worker, (begin, end) in zip(self._workers, parts, strict=True)
        ]
        return UnderWay([worker.generated.remote(batch) for worker in self._workers], collected)

    def finish(self, under_way: UnderWay, timer: Timer) -> list[SampledGroup]:
        """Wait for a generation batch that was begun; returns and raises what `collect` does."""
        with timer.phase("generation"):
            limit = self._generation_timeout_s + GRACE_S
            self._lost.wait(under_way.generated, limit, "generation", WORKER_NAME)
            self._gather(under_way.generated, limit, "generation")
        with timer.phase("environment"):
            answers = self._gather(under_way.collected, ATTEMPTS * self._config.timeout_s + GRACE_S, "scoring")
        self.remarks += [text for collected in answers for text in collected.remarks]
        groups = [
            SampledGroup(outcomes, payload)
            for collected in answers
            for payload, outcomes in zip(collected.payloads.each(), collected.outcomes, strict=True)
        ]
        outcomes = [one for group in groups for one in group.outcomes]
        try:
            require_few_failures(outcomes, self._config.max_failed_fraction)
        except SamplingError as error:  # an engine that hangs is late for its rollouts before the generation is
            engines = [ENGINE_NAME(number) for number in range(len(self._engines))]
            raise SamplingError(f"{error}{report_hanging(engines, 'generation')}") from None
        return groups

    def take_engine_counts(self) -> list[EngineCounts]:
        """What each engine had to do since the last call; of one that fails, nothing: who needs it next will tell."""
        calls = [engine.take_counts.remote() for engine in self._engines]
        over, _ = ray.wait(calls, num_returns=len(calls), timeout=COUNTS_S)
        return [_counts(call) if call in over else EngineCounts() for call in calls]

    def build_shards(
        self, groups: Sequence[SampledGroup], sequences: Sequence[NDArray[np.int64]]
    ) -> list[dict[str, Any]]:
        """Have the tokens of a step put into the object store, an array per shard and field.

        Returns at once: whoever fetches an array waits until it is there, and is told if a worker failed over it.

        Args:
            groups: rollouts of the step, a group for each prompt.
            sequences: per shard [sequences of the shard], int64: numbers of its sequences, ascending; sequences are
                numbered group by group.

        Returns:
            Per shard, by name, a reference to an array [tokens of the shard]: token_ids (int32), sampled (bool: sampled
            rather than given) and generation_logprobs (float32, 0 where not sampled); with recorded routing also
            routed_experts, [tokens of the shard, numbers of a token].
        """
        fields = shard_fields(self._routed)
        shards = places_of(sequences, [len(group.outcomes) for group in groups])
        workers = len(self._workers)
        dealt = [range(worker, len(shards), workers) for worker in range(min(workers, len(shards)))]
        built: list[dict[str, Any]] = [{} for _ in shards]
        for worker, mine in zip(self._workers, dealt, strict=False):
            needed = sorted({group for shard in mine for group, _ in shards[shard]})
            number = {group: position for position, group in enumerate(needed)}
            # Arrays: Ray calls back into Python for every tuple that it serialises.
            local = [
                np.array([(number[group], sample) for group, sample in shards[shard]], dtype=np.int32).reshape(-1, 2)
                for shard in mine
            ]
            call = worker.build_shards.options(num_returns=len(fields) * len(mine))
            references = iter(call.remote(Payloads.of([groups[group].payload for group in needed]), local))
            for shard in mine:
                built[shard] = {name: next(references) for name in fields}
        return built

    def compute(
        self,
        fn: Compute,
        shards: Sequence[ShardRefs],
        sequences: Sequence[NDArray[np.int64]],
        lengths: NDArray[np.int64],
        fields: Sequence[str],
        *args: Any,
    ) -> tuple[list[ShardRefs], Any]:
        """Run a function over the tokens of a whole step, in a worker.

        Args:
            fn: called with `lengths`, a dict of the flat arrays of `fields` in the order of the step, and `args`;
                returns a dict of such arrays, and a summary. Must be importable.
            shards: per shard, by name, references to arrays [tokens of the shard].
            sequences: per shard [sequences of the shard], int64: numbers of its sequences, in the order in which they
                lie in the shard.
            lengths: [sequences of the step], int64: tokens of each sequence.
            fields: names of the entries that the function reads.
            args: further arguments of `fn`.

        Returns:
            The function's arrays as references, per shard and name; and its summary.

        Raises:
            RunError: the function raised, or the worker failed.
        """
        worker = next(self._turn) % len(self._workers)
        call = self._workers[worker].compute.remote(fn, list(shards), list(sequences), lengths, list(fields), args)
        (answer,) = self._gather([call], self._generation_timeout_s, "computation over a step's tokens", worker)
        references, summary = answer
        return references, summary

    def fetch(self, groups: Sequence[SampledGroup]) -> list[list[Trajectory]]:
        """The trajectories themselves, for a few groups: they come through the driver.

        Raises:
            RunError: some are lost with the worker that held them, or do not come in time.
        """
        try:
            return Payloads.of([group.payload for group in groups]).fetch(self._generation_timeout_s)
        except RayError as error:
            raise RunError(f"the trajectories of {len(groups)} groups cannot be fetched: {explain(error)}") from error

    def put(self, groups: Sequence[Sequence[Trajectory]]) -> list[SampledGroup]:
        """Groups of trajectories that are at hand, as `collect` returns groups."""
        bundler = Bundler(len(groups))
        for number, group in enumerate(groups):
            bundler.add(number, list(group))
        payloads = bundler.finish().each()
        outcomes = ([one.outcome for one in group] for group in groups)
        return [SampledGroup(*pair) for pair in zip(outcomes, payloads, strict=True)]

    def dump(
        self, step: int, groups: Sequence[SampledGroup], batch: StepBatch, run_dir: Path, *, sample: int | None = None
    ) -> Any:
        """Have a worker write the rollouts of a step into rollouts/step_N.parquet, while the driver goes on.

        Args:
            step: number of the training step, for the file's name.
            groups: rollouts of the step; a group's place is what the file has as `group`.
            batch: the same rollouts with their advantages, and with whatever else is known of them by now.
            run_dir: the run's folder, in which the folder of rollouts lies.
            sample: write only this many rollouts, evenly spread over the step; None: all.

        Returns:
            What `wait_dump` waits for.
        """
        chosen = evenly_chosen([len(group.outcomes) for group in groups], sample)
        payloads = Payloads.of([group.payload for group in groups])
        known = LearntFrom(
            lengths=batch.lengths,
            sequences=[shard.sequences for shard in batch.shards],
            shards=[shard.fields for shard in batch.shards],
            advantages=batch.advantages,
        )
        worker = next(self._turn) % len(self._workers)
        return worker, self._workers[worker].dump.remote(payloads, chosen, known, rollouts_file(run_dir, step))

    def wait_dump(self, dump: Any) -> None:
        """Return when what `dump` began is written; RunError when it cannot be."""
        worker, written = dump
        self._gather([written], self._generation_timeout_s, "writing of rollouts", worker)

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    @staticmethod
    def _gather(calls: Sequence[Any], deadline_s: float, what: str, first: int = 0) -> list[Any]:
        """The workers' answers; what a worker tells in a message of its own goes on as it is."""
        try:
            return gather(calls, deadline_s=deadline_s, what=what, name=lambda index: WORKER_NAME(first + index))
        except RunError as error:
            cause = error.__cause__
            if isinstance(cause, RayTaskError) and isinstance(cause.cause, RunError):
                raise type(cause.cause)(str(cause.cause)) from None
            raise SamplingError(str(error)) from error


def _counts(call: Any) -> EngineCounts:
    try:
        return cast(EngineCounts, ray.get(call))
    except RayError:
        return EngineCounts()
