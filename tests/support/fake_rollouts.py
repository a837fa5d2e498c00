"""Rollout workers and Ray's object store for tests of what is made of rollouts: all of it in this process.

References are opaque, and arrays behind them read-only, as Ray's are: code that takes a reference for an array fails.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import EngineCounts, SamplingSettings
from megatron_grpo.batch.rollout_files import ROLLOUTS_FOLDER, StepFacts, StepRecord, read_recorded_rollouts
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import STORED_DTYPES, WIDE_FIELDS
from megatron_grpo.batch.trajectory import SampledGroup, Trajectory
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import CompletePrompt
from megatron_grpo.rollouts.rollout import RolloutSettings

Answers = Callable[[Sequence[DatumSpec], int], Sequence[Sequence[Trajectory]]]
"""(prompts, samples of each) -> the samples of each prompt."""


class Reference:
    """What the driver holds instead of a value."""

    def __init__(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.flags.writeable = False
        self._value = value

    def get(self) -> Any:
        """The value itself; tests alone may ask for it without being counted."""
        return self._value


class FakeRay:
    """The object store where the driver reads and writes it itself."""

    def __init__(self) -> None:
        self.gets = 0
        """References that the driver has asked the values of."""

    def get_all(self, references: Sequence[Reference], timeout: float) -> list[Any]:
        assert timeout > 0, "the driver waits with a deadline"
        self.gets += len(references)
        return [reference.get() for reference in references]

    def put(self, value: Any) -> Reference:
        return Reference(value)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Stands in for Ray in those places of the driver's code that ask the object store themselves."""
    fake = FakeRay()
    monkeypatch.setattr("megatron_grpo.cluster.futures.ray", SimpleNamespace(get=fake.get_all))
    monkeypatch.setattr("megatron_grpo.rollouts.partitions.ray", SimpleNamespace(put=fake.put))
    return fake


class FakeRollouts:
    """A `RolloutPool` without processes. `answers` says what is sampled; the rest is done for real, in plain loops."""

    def __init__(self, answers: Answers = lambda *_: []) -> None:
        self.answers = answers
        self.remarks: list[str] = []
        self.next_complete: Callable[[int], int] = lambda count: 0
        """(prompts that are not complete) -> which of them is next."""
        self.complete: dict[int, SampledGroup] = {}
        """Groups by number that have arrived and are not taken."""
        self.asked: list[dict[str, Any]] = []
        """Of every call of collect: the rows of the prompts, and everything else it was given."""
        self.fetched: list[SampledGroup] = []
        """Groups whose tokens the driver has asked for."""
        self.computed: list[str] = []
        """Names of the functions that ran in a worker."""
        self.dumped: list[tuple[Any, ...]] = []
        """Arguments of the calls of dump."""
        self.dumped_into: list[str] = []
        """Folders of the calls of dump, but for that of rollouts."""
        self.awaited: list[Any] = []
        """What the driver has waited for to be written."""

    def make_settings(
        self, samples_per_prompt: int, sampling: SamplingSettings, run_seed: int, generation_batch: int
    ) -> RolloutSettings:
        return RolloutSettings(
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            run_seed=run_seed,
            generation_batch=generation_batch,
            max_total_sequence_length=0,
            timeout_s=0.0,
        )

    def collect(self, prompts: Sequence[DatumSpec], settings: RolloutSettings, timer: StepTimer) -> list[SampledGroup]:
        return self.finish(self.begin(dict(enumerate(prompts)), settings), timer)

    def begin(self, prompts: Mapping[int, DatumSpec], settings: RolloutSettings) -> SimpleNamespace:
        options = {
            name: getattr(settings, name) for name in ("samples_per_prompt", "sampling", "run_seed", "generation_batch")
        }
        self.asked.append({"rows": [prompt["idx"] for prompt in prompts.values()], **options})
        groups = self.put(self.answers(list(prompts.values()), settings.samples_per_prompt))
        streams = dict(zip(prompts, groups, strict=False))
        return SimpleNamespace(groups=groups, streams=streams, complete=[], is_done=lambda: True)

    def finish(self, under_way: SimpleNamespace, timer: StepTimer) -> list[SampledGroup]:
        with timer.phase("generation"):
            return list(under_way.groups)

    def list_complete(self, batches: Sequence[SimpleNamespace]) -> list[CompletePrompt]:
        numbers = [number for batch in batches for number in batch.complete]
        for batch in batches:
            self.complete |= {number: batch.streams.pop(number) for number in batch.complete}
            batch.complete = []
        return [CompletePrompt(batch=0, number=number, worker=0) for number in numbers]

    def take(self, complete: Sequence[CompletePrompt]) -> list[SampledGroup]:
        return [self.complete.pop(prompt.number) for prompt in complete]

    def wait_for_groups(self, batches: Sequence[SimpleNamespace], since: float) -> None:
        """One more prompt is complete, whichever `next_complete` chooses of those that are left."""
        pending = [(number, batch) for batch in batches for number in batch.streams]
        number, chosen = pending[self.next_complete(len(pending))]
        chosen.complete.append(number)

    def take_engine_counts(self) -> dict[int, EngineCounts]:
        return {0: EngineCounts(running=1)}

    def put(self, groups: Sequence[Sequence[Trajectory]]) -> list[SampledGroup]:
        return [
            SampledGroup([trajectory.outcome for trajectory in group], Reference(list(group)), 0) for group in groups
        ]

    def fetch(self, groups: Sequence[SampledGroup]) -> list[list[Trajectory]]:
        self.fetched += groups
        return [group.objects_ref.get() for group in groups]

    def build_partitions(
        self, groups: Sequence[SampledGroup], sequences: Sequence[NDArray[np.int64]]
    ) -> dict[str, list[Reference]]:
        trajectories = [
            part for group in groups for trajectory in group.objects_ref.get() for part in trajectory.split_segments()
        ]
        built: dict[str, list[Reference]] = {name: [] for name in _entries(trajectories[0])}
        for numbers in sequences:
            rows = [_entries(trajectories[number]) for number in numbers]
            for name, references in built.items():
                values = [value for row in rows for value in row[name]]
                references.append(Reference(np.array(values, dtype=STORED_DTYPES[name])))
        return built

    def compute(self, fn: Callable[..., Any], batch: StepBatch, fields: Sequence[str], *args: Any) -> Any:
        self.computed.append(fn.__name__)
        lengths = batch.lengths
        added, summary = fn(lengths, {name: np.concatenate(by_sequence(batch, name)) for name in fields}, *args)
        for name, array in added.items():
            assert len(array) == lengths.sum(), name
            assert name in WIDE_FIELDS or (array.ndim, array.dtype) == (1, STORED_DTYPES[name]), name
            add_entry(batch, name, array)
        return summary

    def load(self, file: Path) -> tuple[StepFacts, list[SampledGroup]]:
        facts, groups = read_recorded_rollouts(file)
        return facts, self.put(groups)

    def dump(
        self,
        step: int,
        groups: Sequence[SampledGroup],
        batch: Any,
        run_dir: Path,
        record: StepRecord,
        *,
        max_rollouts: int | None = None,
        folder: str = ROLLOUTS_FOLDER,
    ) -> Any:
        if folder != ROLLOUTS_FOLDER:
            self.dumped_into.append(folder)
        self.dumped.append((step, groups, batch, run_dir, record, max_rollouts))
        return f"rollouts of step {step}"

    def wait_dump(self, dump: Any) -> None:
        self.awaited.append(dump)


def split(array: NDArray[Any], lengths: Sequence[int] | NDArray[np.int64]) -> list[NDArray[Any]]:
    pieces, begin = [], 0
    for length in lengths:
        pieces.append(array[begin : begin + length])
        begin += length
    assert begin == len(array)
    return pieces


def by_sequence(batch: StepBatch, name: str) -> list[NDArray[Any]]:
    """A stored entry of a batch, one array a sequence, in the order of the step."""
    arrays: dict[int, NDArray[Any]] = {}
    for reference, numbers in zip(batch.fields[name], batch.partitions, strict=True):
        arrays |= zip(numbers.tolist(), split(reference.get(), batch.lengths[numbers]), strict=True)
    return [arrays[number] for number in range(len(batch))]


def add_entry(batch: StepBatch, name: str, values: NDArray[Any]) -> None:
    """Store an entry, flat and in the order of the step, as a model would that computes it."""
    pieces = split(values.astype(STORED_DTYPES.get(name, values.dtype)), batch.lengths)
    batch.fields[name] = [Reference(np.concatenate([pieces[number] for number in shard])) for shard in batch.partitions]


def stored_names(batch: StepBatch) -> set[str]:
    """Entries that every shard of a batch has."""
    assert all(len(references) == len(batch.partitions) for references in batch.fields.values())
    return set(batch.fields)


def _entries(trajectory: Trajectory) -> dict[str, list[Any]]:
    """What is stored of a rollout, an item a token."""
    spans = trajectory.spans
    sampled = [
        any(span.start <= position < span.end for span in spans) for position in range(len(trajectory.token_ids))
    ]
    drawn = iter(trajectory.logprobs.tolist())
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "sampled": sampled,
        "generation_logprobs": [next(drawn) if is_sampled else 0.0 for is_sampled in sampled],
    }
