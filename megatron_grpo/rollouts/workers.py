"""The rollout workers as Ray actors: their start, and their calls on the tokens that they have stored."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from megatron_grpo.batch.rollout_files import StepFacts, StepRecord, locate_rollouts_file
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import SampledGroup, Trajectory
from megatron_grpo.cluster.actor_calls import Arguments, Method, call_actor, call_actor_for_many
from megatron_grpo.cluster.futures import explain_error, gather
from megatron_grpo.cluster.process_names import WORKER_NAME
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.environments.environment_processes import EnvironmentPool
from megatron_grpo.environments.interface import STARTUP_S
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.partitions import (
    TokenFunction,
    choose_evenly,
    list_rollout_fields,
    locate_sequences,
    pack_groups,
    store_groups,
)
from megatron_grpo.rollouts.rollout_worker import RolloutWorker

ENGINES_PER_WORKER = 8


class RolloutWorkers:
    """The actors of a `RolloutPool`, and calls on stored tokens."""

    def __init__(
        self,
        count: int | None,
        engines: Sequence[Any],
        environments: Mapping[str, EnvironmentPool],
        timeout_s: float,
        routed: RoutedForm | None = None,
        endpoint: EndpointSettings | None = None,
    ) -> None:
        # `count` of workers; None: one for every ENGINES_PER_WORKER engines. Other parameters as in `RolloutPool`.
        self._count, self.engines, self._environments = count, engines, environments
        self._timeout_s, self._routed, self._endpoint = timeout_s, routed, endpoint
        self.actors: list[Any] = []
        self._engine_numbers: list[range] = []  # by worker, the numbers of its engines
        self._shares: list[float] = []  # of the prompts, by worker
        self._calls = itertools.count()  # of calls that any worker can answer
        self._starting: dict[int, Any] = {}
        self._started_at = 0.0

    def start(self) -> None:
        self._started_at = time.monotonic()
        engines = len(self.engines)
        workers = self._count or max(1, round(engines / ENGINES_PER_WORKER))
        handles = {name: environment.start(workers) for name, environment in self._environments.items()}
        # Each worker gets neighbouring engines; with more workers than engines, workers share engines.
        starts = [engines * worker // workers for worker in range(workers + 1)]
        self._engine_numbers = [range(begin, min(max(end, begin + 1), engines)) for begin, end in pairwise(starts)]
        # A worker's share of the prompts is that of its engines; an engine of several workers counts in parts.
        users = Counter(itertools.chain.from_iterable(self._engine_numbers))
        shares = [sum(1 / users[engine] for engine in numbers) for numbers in self._engine_numbers]
        self._shares = [share / max(engines, 1) for share in shares]
        actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(RolloutWorker)
        for index, numbers in enumerate(self._engine_numbers):
            endpoint = self._endpoint
            if endpoint is not None and endpoint.port:  # workers listen on consecutive ports
                endpoint = replace(endpoint, port=endpoint.port + index)
            worker = actor.remote(
                index,
                engines={number: self.engines[number] for number in numbers},
                environments={name: by_worker[index] for name, by_worker in handles.items()},
                generation_timeout_s=self._timeout_s,
                endpoint=endpoint,
            )
            self.actors.append(worker)
        self._starting = {number: call_actor(worker, RolloutWorker.start) for number, worker in enumerate(self.actors)}

    def wait_ready(self) -> None:
        """Wait until workers and environments are up; RunError after STARTUP_S."""
        remaining_s = STARTUP_S - (time.monotonic() - self._started_at)
        self._gather(self._starting, max(remaining_s, 0.0), "start of rollouts")

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for worker in self.actors:
            ray.kill(worker)
        self.actors = []

    def build_partitions(
        self, groups: Sequence[SampledGroup], partitions: Sequence[NDArray[np.int64]]
    ) -> dict[str, list[Any]]:
        """Make the workers store a step's tokens as arrays, by partition.

        Returns `StepBatch.fields` with the arrays of `concatenate_trajectories`, without waiting for them: fetching an
        array waits until it is stored, and raises if its worker failed.
        """
        fields = list_rollout_fields(self._routed)
        located = locate_sequences(partitions, [len(group.outcomes) for group in groups])
        workers = min(len(self.actors), len(partitions))
        stored: dict[str, list[Any]] = {name: [None] * len(partitions) for name in fields}
        for number, worker in enumerate(self.actors[:workers]):
            assigned = range(number, len(partitions), workers)
            # A worker gets only the groups of its own partitions, numbered anew.
            needed = sorted({group for partition in assigned for group, _ in located[partition]})
            new_index = {group: index for index, group in enumerate(needed)}
            # Arrays instead of tuples, because Ray calls back into Python for every tuple that it pickles.
            pairs = ([(new_index[group], sample) for group, sample in located[partition]] for partition in assigned)
            renumbered = [np.array(sequences, dtype=np.int32).reshape(-1, 2) for sequences in pairs]
            packed = pack_groups([groups[group] for group in needed])
            results = len(fields) * len(assigned)
            references = iter(
                call_actor_for_many(worker, results, RolloutWorker.build_partitions, packed, renumbered, self._routed)
            )
            for partition in assigned:
                for name in fields:
                    stored[name][partition] = next(references)
        return stored

    def compute(self, fn: TokenFunction, batch: StepBatch, fields: Sequence[str], *args: Any) -> Any:
        """Add new fields, computed in a worker, to the batch; returns the summary.

        `fn` is called with the lengths, the arrays of `fields` and `args`, and must be importable in the worker. Raises
        RunError if it raised, or the worker failed.
        """
        call = self._call_next(RolloutWorker.compute, fn, batch, list(fields), args)
        ((new_fields, summary),) = self._gather(call, self._timeout_s, "computation over a step's tokens")
        batch.fields |= new_fields
        return summary

    def fetch(self, groups: Sequence[SampledGroup]) -> list[list[Trajectory]]:
        """Fetch the trajectories of a few groups; RunError if one was lost."""
        try:
            return pack_groups(groups).fetch(self._timeout_s)
        except RayError as error:
            raise RunError(
                f"the trajectories of {len(groups)} groups cannot be fetched: {explain_error(error)}"
            ) from error

    def put(self, groups: Sequence[Sequence[Trajectory]]) -> list[SampledGroup]:
        return store_groups(groups).unpack()

    def load(self, file: Path) -> tuple[StepFacts, list[SampledGroup]]:
        """Read a step's rollouts from an earlier run's file; raises RunError."""
        call = self._call_next(RolloutWorker.load, file)
        ((facts, packed),) = self._gather(call, self._timeout_s, "reading of rollouts")
        return facts, packed.unpack()

    def dump(
        self,
        step: int,
        groups: Sequence[SampledGroup],
        batch: StepBatch | None,
        run_dir: Path,
        record: StepRecord,
        *,
        max_rollouts: int | None = None,
    ) -> Any:
        """Begin to write a step's rollouts into rollouts/step_N.parquet; returns the argument of `wait_dump`.

        The column `group` of the file is the index in `groups`. Advantages and log-probabilities are written as far as
        `batch` has them (None: the run does not train). `max_rollouts` are spread evenly over the step; None: all are
        written.
        """
        chosen = choose_evenly([len(group.outcomes) for group in groups], max_rollouts)
        file = locate_rollouts_file(run_dir, step)
        return self._call_next(RolloutWorker.dump, pack_groups(groups), chosen, batch, file, record)

    def wait_dump(self, dump: Any) -> None:
        """Wait until a `dump` is written; RunError if that fails."""
        self._gather(dump, self._timeout_s, "writing of rollouts")

    def _call_next(
        self, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> dict[int, Any]:
        worker = next(self._calls) % len(self.actors)
        return {worker: call_actor(self.actors[worker], method, *args, **kwargs)}

    @staticmethod
    def _gather(calls: Mapping[int, Any], deadline_s: float, phase_name: str) -> list[Any]:
        """Wait for answers; SamplingError, or the RunError that a worker raised."""
        names = [WORKER_NAME(worker) for worker in calls]
        try:
            return gather(list(calls.values()), deadline_s=deadline_s, phase_name=phase_name, name=names.__getitem__)
        except RunError as error:
            cause = error.__cause__
            # The worker's own RunError says more than that its call failed.
            if isinstance(cause, RayTaskError) and isinstance(cause.cause, RunError):
                raise type(cause.cause)(str(cause.cause)) from None
            raise SamplingError(str(error)) from error
