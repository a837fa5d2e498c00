"""The tokens of rollouts, which workers keep in the object store, pack, compute on and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError, RayTaskError

from megatron_grpo.batch.rollout_files import ROLLOUTS_FOLDER, StepFacts, StepRecord, locate_rollouts_file
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import SampledGroup, Trajectory
from megatron_grpo.cluster.actor_calls import Arguments, Method, call_actor, call_actor_for_many
from megatron_grpo.cluster.futures import explain_error, gather
from megatron_grpo.cluster.process_log import WORKER_NAME
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts import partitions
from megatron_grpo.rollouts.partitions import Partitions, TokenFunction
from megatron_grpo.rollouts.rollout_worker import RolloutWorker


@dataclass(eq=False, kw_only=True)
class TokenStore:
    """The driver's handle of the tokens of sampled or read groups.

    Groups in the driver have outcomes and references; what follows takes the tokens from worker to worker and to the
    ranks, and never to the driver, except by `fetch`.
    """

    generation_timeout_s: float  # deadline for sampling one generation batch, and for each call on its tokens
    routed: RoutedForm | None = None  # form of the experts that engines return; None: engines return none

    def __post_init__(self) -> None:
        self.actors: list[Any] = []
        self._calls = count()  # of calls that any worker can answer

    def build_partitions(self, groups: Sequence[SampledGroup], sequences: Partitions) -> dict[str, list[Any]]:
        """Make the workers store a step's tokens as arrays, by partition.

        Returns `StepBatch.fields` with the arrays of `concatenate_trajectories`, without waiting for them: fetching an
        array waits until it is stored, and raises if its worker failed.
        """
        fields = partitions.list_rollout_fields(self.routed)
        located = partitions.locate_sequences(
            sequences, [partitions.count_sequences(group.outcomes) for group in groups]
        )
        workers = min(len(self.actors), len(sequences))
        stored: dict[str, list[Any]] = {name: [None] * len(sequences) for name in fields}
        for number, worker in enumerate(self.actors[:workers]):
            assigned = range(number, len(sequences), workers)
            # A worker gets only the groups of its own partitions, numbered anew.
            needed = sorted({group for partition in assigned for group, _ in located[partition]})
            new_index = {group: index for index, group in enumerate(needed)}
            # Arrays instead of tuples, because Ray calls back into Python for every tuple that it pickles.
            pairs = ([(new_index[group], index) for group, index in located[partition]] for partition in assigned)
            indices = [np.array(located_pairs, dtype=np.int32).reshape(-1, 2) for located_pairs in pairs]
            packed = partitions.pack_groups([groups[group] for group in needed])
            results = len(fields) * len(assigned)
            calls = call_actor_for_many(worker, results, RolloutWorker.build_partitions, packed, indices, self.routed)
            for (partition, name), reference in zip(product(assigned, fields), calls, strict=True):
                stored[name][partition] = reference
        return stored

    def compute(self, fn: TokenFunction, batch: StepBatch, fields: Sequence[str], *args: Any) -> Any:
        """Add new fields, computed in a worker, to the batch; returns the summary.

        `fn` is called with the lengths, the arrays of `fields` and `args`, and must be importable in the worker. Raises
        RunError if it raised, or the worker failed.
        """
        call = self._call_next(RolloutWorker.compute, fn, batch, list(fields), args)
        ((new_fields, summary),) = self._gather(call, self.generation_timeout_s, "computation over a step's tokens")
        batch.fields |= new_fields
        return summary

    def fetch(self, groups: Sequence[SampledGroup]) -> list[list[Trajectory]]:
        """Fetch the trajectories of a few groups; RunError if one was lost."""
        try:
            return partitions.pack_groups(groups).fetch(self.generation_timeout_s)
        except RayError as error:
            reason = explain_error(error)
            raise RunError(f"the trajectories of {len(groups)} groups cannot be fetched: {reason}") from error

    def put(self, groups: Sequence[Sequence[Trajectory]]) -> list[SampledGroup]:
        return partitions.store_groups(groups).unpack()

    def load(self, file: Path) -> tuple[StepFacts, list[SampledGroup]]:
        """Read a step's rollouts from an earlier run's file; raises RunError."""
        call = self._call_next(RolloutWorker.load, file)
        ((facts, packed),) = self._gather(call, self.generation_timeout_s, "reading of rollouts")
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
        folder: str = ROLLOUTS_FOLDER,
    ) -> Any:
        """Begin to write a step's rollouts into FOLDER/step_N.parquet; returns the argument of `wait_dump`.

        The column `group` of the file is the index in `groups`. Advantages and log-probabilities are written as far as
        `batch` has them (None: the run does not train). `max_rollouts` are spread evenly over the step; None: all are
        written.
        """
        chosen = partitions.choose_evenly([len(group.outcomes) for group in groups], max_rollouts)
        file = locate_rollouts_file(run_dir, step, folder)
        return self._call_next(RolloutWorker.dump, partitions.pack_groups(groups), chosen, batch, file, record)

    def wait_dump(self, dump: Any) -> None:
        """Wait until a `dump` is written; RunError if that fails."""
        self._gather(dump, self.generation_timeout_s, "writing of rollouts")

    def _call_next(self, method: Method[Arguments], *args: Arguments.args, **named: Arguments.kwargs) -> dict[int, Any]:
        worker = next(self._calls) % len(self.actors)
        return {worker: call_actor(self.actors[worker], method, *args, **named)}

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
