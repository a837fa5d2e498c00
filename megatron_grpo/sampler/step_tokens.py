"""The driver's access to the tokens of a step, through rollout workers: shards, computations over all tokens, files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.cluster.futures import explain
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.rollout_files import StepFacts, StepRecord, rollouts_file
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.data.trajectory import SampledGroup, Trajectory
from megatron_grpo.sampler.shards import (
    Compute,
    build_shards,
    bundled,
    collected,
    compute,
    dump,
    evenly_chosen,
    fetched,
    groups_of,
    load,
    places_of,
    shard_fields,
)
from megatron_grpo.sampler.worker_group import WorkerGroup


class StepTokens:
    """Lets rollout workers build shards, compute over tokens and write files; the driver holds only references."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers, self._timeout_s = workers, workers.generation_timeout_s

    def build_shards(
        self, groups: Sequence[SampledGroup], sequences: Sequence[NDArray[np.int64]]
    ) -> dict[str, list[Any]]:
        """Make a worker put the tokens of a step into the object store, one array per shard and field.

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
        fields = shard_fields(self._workers.routed)
        shards = places_of(sequences, [len(group.outcomes) for group in groups])
        workers = len(self._workers.actors)
        dealt = [range(worker, len(shards), workers) for worker in range(min(workers, len(shards)))]
        built: dict[str, list[Any]] = {name: [None] * len(shards) for name in fields}
        for worker, mine in zip(self._workers.actors, dealt, strict=False):
            needed = sorted({group for shard in mine for group, _ in shards[shard]})
            number = {group: position for position, group in enumerate(needed)}
            # Arrays instead of tuples, because Ray calls back into Python for every tuple that it pickles.
            local = [
                np.array([(number[group], sample) for group, sample in shards[shard]], dtype=np.int32).reshape(-1, 2)
                for shard in mine
            ]
            call = worker.on_thread.options(num_returns=len(fields) * len(mine))
            bundles = bundled([groups[group] for group in needed])
            references = iter(call.remote("build shards", build_shards, bundles, local, self._workers.routed))
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
        ((added, summary),) = self._workers.gather(call, self._timeout_s, "computation over a step's tokens")
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
            raise RunError(f"the trajectories of {len(groups)} groups cannot be fetched: {explain(error)}") from error

    def put(self, groups: Sequence[Sequence[Trajectory]]) -> list[SampledGroup]:
        """Put trajectories into the object store; returns their groups in the form of `RolloutPool.collect`."""
        return groups_of(replace(collected(groups, []), outcomes=[[one.outcome for one in group] for group in groups]))

    def load(self, file: Path) -> tuple[StepFacts, list[SampledGroup]]:
        """Read a step's rollouts from the file of an earlier run: facts of their sampling, and one group per prompt.

        Raises:
            RunError: the file cannot be read in time.
        """
        call = self._begin("read rollouts", load, file)
        ((facts, collected),) = self._workers.gather(call, self._timeout_s, "reading of rollouts")
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
        file = rollouts_file(run_dir, step)
        return self._begin("write rollouts", dump, bundled(groups), chosen, batch, file, record)

    def wait_dump(self, dump: Any) -> None:
        """Wait until the file of a `dump` is written; RunError if that fails."""
        self._workers.gather(dump, self._timeout_s, "writing of rollouts")

    def _begin(self, what: str, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
        """Begin `RolloutWorker.on_thread` in the next worker (round robin); returns the call by the worker's number."""
        worker = self._workers.next()
        return {worker: self._workers.actors[worker].on_thread.remote(what, function, *arguments)}
