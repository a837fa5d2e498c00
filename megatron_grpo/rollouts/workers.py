"""The rollout workers as Ray actors: their start, and their calls on the tokens that they have stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from megatron_grpo.batch.rollout_files import StepFacts, StepRecord, locate_rollouts_file
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import SampledGroup, Trajectory
from megatron_grpo.cluster.futures import explain_error, gather
from megatron_grpo.cluster.process_names import WORKER_NAME
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.environments.environment_processes import STARTUP_S, EnvironmentPool
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.rollout_worker import RolloutWorker
from megatron_grpo.rollouts.shards import (
    Compute,
    build_partitions,
    bundled,
    collected,
    compute,
    dump,
    evenly_chosen,
    fetched,
    groups_of,
    load,
    partition_fields,
    places_of,
)

ENGINES_PER_WORKER = 8

Item = TypeVar("Item")


class RolloutWorkers:
    """The actors of a `RolloutPool`, and what they do with stored tokens.

    Workers build shards, compute over tokens and write files; the driver holds only references to tokens.
    """

    def __init__(
        self,
        number: int | None,
        engines: Sequence[Any],
        environments: Mapping[str, EnvironmentPool],
        *,
        timeout_s: float,
        routed: RoutedForm | None = None,
        endpoint: EndpointSettings | None = None,
    ) -> None:
        """
        Args:
            number: count of workers; None: one for every ENGINES_PER_WORKER engines.
            engines: Ray actors with `generate` and `abort`, in the order of their numbers; empty: nothing is sampled.
            environments: pools of environment processes by task name, not yet started.
            timeout_s: deadline for sampling one generation batch, and for each call on its tokens.
            routed: form of the experts that engines return, or None.
            endpoint: settings of the endpoints for agents, or None.
        """
        self._endpoint = endpoint
        self._number, self.engines, self._environments = number, engines, environments
        self._timeout_s, self._routed = timeout_s, routed
        self.actors: list[Any] = []
        self._engines_of: list[range] = []
        """By worker, the numbers of the engines that it uses."""
        self._shares: list[float] = []
        self._turn = count()
        self._starting: dict[int, Any] = {}
        self._started_at = 0.0

    def start(self) -> None:
        """Begin to start the environments and the workers."""
        self._started_at = time.monotonic()
        engines = len(self.engines)
        workers = self._number or max(1, round(engines / ENGINES_PER_WORKER))
        handles = {name: one.start(workers) for name, one in self._environments.items()}
        # Each worker gets neighbouring engines; with more workers than engines, workers share engines.
        starts = [engines * worker // workers for worker in range(workers + 1)]
        self._engines_of = [range(begin, min(max(end, begin + 1), engines)) for begin, end in pairwise(starts)]
        users = [sum(engine in one for one in self._engines_of) for engine in range(engines)]
        self._shares = [sum(1 / users[engine] for engine in one) / max(engines, 1) for one in self._engines_of]
        actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(RolloutWorker)
        for index, numbers in enumerate(self._engines_of):
            worker = actor.remote(
                index,
                engines={number: self.engines[number] for number in numbers},
                environments={name: shares[index] for name, shares in handles.items()},
                generation_timeout_s=self._timeout_s,
                endpoint=None if self._endpoint is None else self._endpoint.of_worker(index),
            )
            self.actors.append(worker)
        self._starting = {number: worker.ready.remote() for number, worker in enumerate(self.actors)}

    def wait_ready(self) -> None:
        """Wait until every worker and its environments are up; RunError if that takes over STARTUP_S from `start`."""
        left = STARTUP_S - (time.monotonic() - self._started_at)
        self._gather(self._starting, max(left, 0.0), "start of rollouts")

    def _share_out(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divide items among the workers in proportion to their engines; each part is contiguous."""
        bounds = [round(len(items) * share) for share in np.cumsum([0.0, *self._shares]).tolist()]
        return [list(items[begin:end]) for begin, end in pairwise(bounds)]

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for worker in self.actors:
            ray.kill(worker)
        self.actors = []

    @staticmethod
    def _gather(calls: Mapping[int, Any], deadline_s: float, what: str) -> list[Any]:
        """Wait for the answers to calls, given by number of the worker; returns them in the order of the calls.

        Raises:
            SamplingError: a worker failed or missed the deadline.
            RunError: a worker raised this error itself; its class and message are kept.
        """
        names = [WORKER_NAME(worker) for worker in calls]
        try:
            return gather(list(calls.values()), deadline_s=deadline_s, phase_name=what, name=names.__getitem__)
        except RunError as error:
            cause = error.__cause__
            if isinstance(cause, RayTaskError) and isinstance(cause.cause, RunError):
                raise type(cause.cause)(str(cause.cause)) from None
            raise SamplingError(str(error)) from error

    def build_partitions(
        self, groups: Sequence[SampledGroup], sequences: Sequence[NDArray[np.int64]]
    ) -> dict[str, list[Any]]:
        """Make the workers put the tokens of a step into the object store, one array per shard and field.

        Returns at once. Fetching an array waits until it is stored, and raises if its worker failed.

        Args:
            groups: rollouts of the step, a group for each prompt.
            sequences: per shard [sequences of the shard], int64: numbers of its sequences, ascending; sequences are
                numbered group by group.

        Returns:
            By name of the field, per shard a reference to an array [tokens of the shard]: token_ids (int32), sampled
            (bool: the token was sampled, not given), generation_logprobs (float32, 0 where not sampled); with recorded
            routing also routed_experts, [tokens of the shard, experts recorded per token].
        """
        fields = partition_fields(self._routed)
        shards = places_of(sequences, [len(group.outcomes) for group in groups])
        workers = len(self.actors)
        dealt = [range(worker, len(shards), workers) for worker in range(min(workers, len(shards)))]
        built: dict[str, list[Any]] = {name: [None] * len(shards) for name in fields}
        for worker, mine in zip(self.actors, dealt, strict=False):
            needed = sorted({group for shard in mine for group, _ in shards[shard]})
            number = {group: position for position, group in enumerate(needed)}
            # Arrays instead of tuples, because Ray calls back into Python for every tuple that it pickles.
            local = [
                np.array([(number[group], sample) for group, sample in shards[shard]], dtype=np.int32).reshape(-1, 2)
                for shard in mine
            ]
            call = worker.on_thread.options(num_returns=len(fields) * len(mine))
            bundles = bundled([groups[group] for group in needed])
            references = iter(call.remote("build shards", build_partitions, bundles, local, self._routed))
            for shard in mine:
                for name in fields:
                    built[name][shard] = next(references)
        return built

    def compute(
        self,
        fn: Compute,
        batch: StepBatch,
        fields: Sequence[str],
        *args: Any,
    ) -> Any:
        """Run `compute` of shards.py in a worker, add the entries that it returns to the batch, and return its summary.

        `fn` must be importable in the worker.

        Raises:
            RunError: the function raised, or the worker failed.
        """
        call = self._begin("compute", compute, fn, batch, list(fields), args)
        ((added, summary),) = self._gather(call, self._timeout_s, "computation over a step's tokens")
        batch.fields |= added
        return summary

    def fetch(self, groups: Sequence[SampledGroup]) -> list[list[Trajectory]]:
        """Fetch the trajectories of a few groups into the driver.

        Raises:
            RunError: a trajectory was lost with its worker, or did not arrive in time.
        """
        try:
            return fetched(bundled(groups), self._timeout_s)
        except RayError as error:
            raise RunError(
                f"the trajectories of {len(groups)} groups cannot be fetched: {explain_error(error)}"
            ) from error

    def put(self, groups: Sequence[Sequence[Trajectory]]) -> list[SampledGroup]:
        """Put trajectories into the object store; returns their groups in the form of `RolloutPool.collect`."""
        return groups_of(replace(collected(groups, []), outcomes=[[one.outcome for one in group] for group in groups]))

    def load(self, file: Path) -> tuple[StepFacts, list[SampledGroup]]:
        """Read a step's rollouts from the file of an earlier run: facts of their sampling, and one group per prompt.

        Raises:
            RunError: the file cannot be read in time.
        """
        call = self._begin("read rollouts", load, file)
        ((facts, collected),) = self._gather(call, self._timeout_s, "reading of rollouts")
        return facts, groups_of(collected)

    def dump(
        self,
        step: int,
        groups: Sequence[SampledGroup],
        batch: StepBatch | None,
        run_dir: Path,
        record: StepRecord,
        *,
        sample: int | None = None,
    ) -> Any:
        """Make a worker write the rollouts of a step into rollouts/step_N.parquet, while the driver continues.

        Args:
            step: number of the training step, for the file's name.
            groups: rollouts of the step; the column `group` of the file is a group's position here.
            batch: the step's batch, whose advantages and log-probabilities are written where they are known; None: the
                run does not train.
            run_dir: the run's folder.
            record: facts of the step for the file.
            sample: write only this many rollouts, evenly spread over the step; None: all.

        Returns:
            The argument of `wait_dump`.
        """
        chosen = evenly_chosen([len(group.outcomes) for group in groups], sample)
        file = locate_rollouts_file(run_dir, step)
        return self._begin("write rollouts", dump, bundled(groups), chosen, batch, file, record)

    def wait_dump(self, dump: Any) -> None:
        """Wait until the file of a `dump` is written; RunError if that fails."""
        self._gather(dump, self._timeout_s, "writing of rollouts")

    def _begin(self, what: str, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
        """Begin `RolloutWorker.on_thread` in the next worker (round robin); returns the call by the worker's number."""
        worker = next(self._turn) % len(self.actors)
        return {worker: self.actors[worker].on_thread.remote(what, function, *arguments)}
