"""Files of a step: rollouts that are written, or read instead of sampling, and responses with non-finite values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.rollout_files import (
    RunFacts,
    StepFacts,
    StepRecord,
    find_recorded_steps,
    locate_rollouts_file,
    read_rows,
)
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import find_token_indices
from megatron_grpo.batch.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.cluster.futures import fetch_stored
from megatron_grpo.config.errors import ConfigError, Problem, RunError, SamplingError
from megatron_grpo.config.schema import Config, LoggerConfig
from megatron_grpo.data.loader import Batches
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.models.source import compute_vocabulary_digest
from megatron_grpo.observability.run_files import write_json
from megatron_grpo.observability.run_logger import select_first_of_groups
from megatron_grpo.rollouts.pool import RolloutPool


class RecordedSteps(Batches):
    """Recorded steps of an earlier run, in place of a loader; it has that run's position in the data, for checkpoints.

    Args:
        path: folder of the run, or its folder of rollouts.
        prompts_per_batch: prompts that the run sampled together.
    """

    def __init__(self, path: str, prompts_per_batch: int) -> None:
        self.path, self.prompts_per_batch = path, prompts_per_batch
        self.files: Mapping[int, Path] = find_recorded_steps(path)
        """The file of each step."""
        self._position: dict[str, Any] = {"epoch": 0}

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """Yield nothing: a recording has rollouts instead of prompts."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """State of the recorded run's loader after the last step that was read; JSON-serialisable."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which the recorded run's loader had this state."""
        self._position, self.epoch = state, int(state["epoch"])

    def require_start(self, step: int) -> None:
        """Check that the recording does not begin after `step`, the run's next one.

        Raises:
            ConfigError: the recording begins later.
        """
        if min(self.files) > step:
            text = f"begins with step {min(self.files)}, and this run with step {step}; start from the checkpoint that "
            raise ConfigError([Problem(f"debug.rollouts_from={self.path}", f"{text}the recorded run started from")])

    @property
    def end_of_data(self) -> str:
        """Message for a run that ends because the recording has no further step."""
        return f"the recording is used up: {self.path} ends with step {max(self.files)}"


class RolloutDumps:
    """Writes rollouts while their step learns; the step is reported only when its rollouts are on disk.

    Args:
        rollouts: the pool whose workers write the files.
        config: which rollouts are written.
        run_dir: the run's folder.
        facts: facts about the run that every file holds.
    """

    def __init__(self, rollouts: RolloutPool, config: LoggerConfig, run_dir: Path, facts: RunFacts) -> None:
        self._rollouts, self._config, self._run_dir, self._facts = rollouts, config, run_dir, facts
        self._writing: dict[int, Any] = {}
        self._held: tuple[int, list[SampledGroup], StepBatch | None, StepFacts] | None = None

    def hold(self, step: int, groups: list[SampledGroup], batch: StepBatch | None, facts: StepFacts) -> None:
        """Keep the rollouts of a step until `begin`, or until `leave` if the step fails before.

        Args:
            step: number of the step.
            groups: the rollouts, a group for each prompt.
            batch: the step's batch, to which later stages add advantages and log-probabilities; None: the run does not
                train.
            facts: facts about the sampling of the step, for the file.
        """
        self._held = (step, groups, batch, facts)

    def begin(self) -> None:
        """Begin to write the rollouts of the held step that logger.rollouts selects, all of them for a later replay."""
        assert self._held is not None, "hold() comes first"
        step, groups, batch, facts = self._held
        self._held = None
        replays = self._config.has_replay(step) and batch is not None
        if self._config.rollouts != "off" or replays:
            limit = self._config.rollouts_sample if self._config.rollouts == "sample" and not replays else None
            record = StepRecord(self._facts, facts)
            self._writing[step] = self._rollouts.dump(step, groups, batch, self._run_dir, record, sample=limit)

    def finish(self, step: int) -> None:
        """Wait until the rollouts of a step are on disk; RunError: they could not be written."""
        if step in self._writing:
            self._rollouts.wait_dump(self._writing.pop(step))

    def write_all(self) -> None:
        """Write the rollouts of a failed step, and wait until all are on disk; RunError: they could not be written."""
        if self._held is not None:
            self.begin()
        for step in list(self._writing):
            self.finish(step)

    def read_rows(self, step: int) -> list[dict[str, Any]]:
        """Read logger.num_completions_to_print rows from the file of a step's rollouts."""
        rows = read_rows(step, locate_rollouts_file(self._run_dir, step))
        return select_first_of_groups(rows, self._config.num_completions_to_print)


def describe_run(config: Config, folder: Path) -> RunFacts:
    """Facts about a run for its files of rollouts; `folder`: the folder of the policy's model."""
    loop = config.training_loop
    return RunFacts(
        prompts_per_step=loop.num_prompts_per_step,
        samples_per_prompt=loop.num_generations_per_prompt,
        max_num_steps=loop.max_num_steps,
        vocab=read_model_shape(folder).vocab,
        vocabulary=compute_vocabulary_digest(folder),
    )


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_NAMED = 8
"""Most prompts that a message names; the file has all of them."""


@dataclass(frozen=True, slots=True)
class StepCheck:
    """Checks the values of one step; a non-finite value ends the run, and its responses are written to a file."""

    run_dir: Path
    fetch: Callable[[Sequence[SampledGroup]], list[list[Trajectory]]]
    """Brings the tokens and texts of groups to the driver (`RolloutPool.fetch`)."""
    groups: Sequence[SampledGroup]
    """Rollouts, a group for each prompt."""
    step: int
    """Number of the step, or of the last one before a validation."""
    data: str = "training"
    """Name of the prompts' data set, for messages."""

    def require_finite_samples(self) -> None:
        """Check the rewards and the sampling log-probabilities.

        Raises:
            SamplingError: a reward is not finite.
            RunError: a sampling log-probability is not finite.
        """
        outcomes = [outcome for group in self.groups for outcome in group.outcomes]
        broken = [number for number, one in enumerate(outcomes) if not one.finite_logprobs]
        if broken:  # the weights themselves may be broken
            self.stop("a sampling log-probability", broken)
        rewards = [n for n, one in enumerate(outcomes) if not _all_fit([one.reward, *one.reward_parts.values()])]
        if rewards:
            parts = [part for number in rewards for part in outcomes[number].reward_parts.items()]
            functions = sorted({name for name, value in parts if not _all_fit([value])})
            self.stop(
                " of ".join(["the reward", *([", ".join(functions)] if functions else [])]),
                rewards,
                error=SamplingError,
            )

    def require_finite(self, entry: str, finite: NDArray[np.bool_], batch: StepBatch) -> None:
        """Check an entry that was computed for every token.

        Args:
            entry: name of the entry, for the message.
            finite: [sequences], bool: whether the entry is finite wherever it is used.
            batch: the step's batch, one sequence for each response.

        Raises:
            RunError: the entry is not finite somewhere (`stop` makes the message).
        """
        if not finite.all():
            wrong = np.flatnonzero(~finite)
            self.stop(f"an entry of {entry}", wrong.tolist(), {entry: _rows(batch, entry, wrong)})

    def stop(
        self,
        what: str,
        bad: Sequence[int],
        more: Mapping[str, Sequence[object]] | None = None,
        error: type[RunError] = RunError,
    ) -> NoReturn:
        """Write the offending responses to run_dir/non_finite_step_N.json and end the run.

        In the file the values are the strings NaN, Infinity and -Infinity: JSON has no such numbers.

        Args:
            what: name of the non-finite value, for the message.
            bad: numbers of the responses in the step.
            more: further entries of the file by name, an item for each response.
            error: class of the error to raise.

        Raises:
            RunError: always; names the prompts, as rows of the data.
        """
        file = self.run_dir / f"non_finite_step_{self.step}.json"
        outcomes: list[Outcome] = [outcome for group in self.groups for outcome in group.outcomes]
        places = [(number, row) for number, group in enumerate(self.groups) for row in range(len(group.outcomes))]
        concerned = sorted({places[index][0] for index in bad})
        fetched = dict(zip(concerned, self.fetch([self.groups[one] for one in concerned]), strict=True))
        rows = [
            # `group` is the group's number in the step, not in its generation batch.
            {**fetched[places[index][0]][places[index][1]].to_row(), "group": outcomes[index].group}
            for index in bad
        ]
        prompts = sorted({outcomes[index].prompt_idx for index in bad})
        found = {"step": self.step, "what": what, "data": self.data, "prompt_ids": prompts, "trajectories": rows}
        write_json(file, json.loads(json.dumps({**found, **(more or {})}), parse_constant=str))
        named = ", ".join(map(str, prompts[:_NAMED])) + (", ..." if len(prompts) > _NAMED else "")
        raise error(
            f"step {self.step}: {what} is not finite for {len(bad)} response(s) to prompt(s) {named} of the "
            f"{self.data} data; no weights were changed by it and nothing of this step was saved; {file} has the "
            "responses"
        )


def _all_fit(values: Any) -> bool:
    """Whether all values that are not None are finite in float32, the type of the computation."""
    return all(value is None or abs(value) <= LARGEST_FLOAT32 for value in values)  # false for NaN


def _rows(batch: StepBatch, entry: str, sequences: NDArray[np.int64]) -> list[list[float]]:
    """Values of an entry in the given sequences ([chosen], int64); fetches the entry of the shards that hold them."""
    if entry == "advantages" and batch.advantages is not None:
        return [[float(batch.advantages[number])] for number in sequences]
    rows: dict[int, list[float]] = {}
    for shard, reference in zip(batch.partitions, batch.fields[entry], strict=True):
        for place in np.flatnonzero(np.isin(shard, sequences)):
            tokens = find_token_indices(batch.lengths[shard], np.array([place]))
            rows[int(shard[place])] = fetch_stored([reference], entry)[0][tokens].tolist()
    return [rows[int(number)] for number in sequences]
