"""Files of a step: rollouts that are written, or read instead of sampling, and responses with non-finite values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch import rollout_files as files
from megatron_grpo.batch.rollout_files import TrainedValues
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import find_token_indices
from megatron_grpo.batch.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.cluster.futures import fetch_stored
from megatron_grpo.config.errors import ConfigError, Problem, RunError, SamplingError
from megatron_grpo.config.schema import Config, LoggerConfig
from megatron_grpo.data.loader import BatchLoader
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import is_reward
from megatron_grpo.models.source import compute_vocabulary_digest, read_policy_shape
from megatron_grpo.observability.run_files import write_json
from megatron_grpo.observability.run_logger import select_first_of_groups
from megatron_grpo.rollouts.pool import RolloutPool

# Rows and validation responses are written for people to look at: of some steps, and of each some.
SAMPLED_STEPS = 128
SAMPLE_ROWS = 64
SAMPLE_TOKENS = 2**16  # at least one row is written, whatever its length


class RecordedSteps(BatchLoader):
    """Recorded steps of an earlier run, in place of a loader."""

    def __init__(self, path: str, prompts_per_batch: int) -> None:
        self.path, self.prompts_per_batch = path, prompts_per_batch
        self.files: Mapping[int, Path] = files.find_recorded_steps(path)  # by step
        # State of the recorded run's loader after the last step that was read.
        self._position: dict[str, Any] = {"epoch": 0}

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        return iter(())  # a recording has rollouts instead of prompts

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self.epoch = state, int(state["epoch"])

    def require_start(self, step: int) -> None:
        """Raise a ConfigError if the recording begins after `step`."""
        if min(self.files) > step:
            text = f"begins with step {min(self.files)}, and this run with step {step}; start from the checkpoint that "
            raise ConfigError([Problem(f"debug.rollouts_from={self.path}", f"{text}the recorded run started from")])

    @property
    def end_of_data(self) -> str:
        """Message for a run whose recording has no further step."""
        return f"the recording is used up: {self.path} ends with step {max(self.files)}"


class RolloutDumps:
    """Writes rollouts while their step learns."""

    def __init__(self, rollouts: RolloutPool, config: LoggerConfig, run_dir: Path, facts: files.RunFacts) -> None:
        self._rollouts, self._config, self._run_dir, self._facts = rollouts, config, run_dir, facts
        self._writing: dict[int, Any] = {}  # by step, the writing of its file
        self._current: tuple[int, list[SampledGroup], StepBatch | None, files.StepFacts] | None = None

    def hold(self, step: int, groups: list[SampledGroup], batch: StepBatch | None, facts: files.StepFacts) -> None:
        """Hold the rollouts of a step until `begin` or `write_all`."""
        # Later stages extend the batch, so that a step that fails midway is written with the fields that it has.
        self._current = (step, groups, batch, facts)

    def begin(self) -> None:
        """Begin to write the rollouts that logger.rollouts selects."""
        assert self._current is not None, "hold() comes first"
        step, groups, batch, facts = self._current
        self._current = None
        needs_all = self._config.has_replay(step) and batch is not None  # for a later replay
        if self._config.rollouts != "off" or needs_all:
            limit = self._config.rollouts_sample if self._config.rollouts == "sample" and not needs_all else None
            record = files.StepRecord(self._facts, facts)
            self._writing[step] = self._rollouts.dump(step, groups, batch, self._run_dir, record, max_rollouts=limit)

    def finish(self, step: int) -> None:
        """Wait until the rollouts of a step are on disk."""
        if step in self._writing:
            self._rollouts.wait_dump(self._writing.pop(step))

    def write_all(self) -> None:
        """Write the rollouts of a failed step, and wait for all."""
        if self._current is not None:
            self.begin()
        for step in list(self._writing):
            self.finish(step)

    def write_validation(self, step: int, groups: Sequence[SampledGroup], period: int) -> None:
        """Write responses of the validation after `step`; `period`: steps between validations."""
        if not self.is_sampled(step, max(period, 1)):
            return
        run = replace(self._facts, prompts_per_step=len(groups), samples_per_prompt=1)
        tokens = [group.outcomes[0].tokens for group in groups]
        facts = files.StepFacts(position={}, longest=max(tokens))
        count = count_within(tokens, SAMPLE_ROWS, SAMPLE_TOKENS)
        record, folder = files.StepRecord(run, facts), files.VALIDATION_FOLDER
        call = self._rollouts.dump(step, groups, None, self._run_dir, record, max_rollouts=count, folder=folder)
        self._rollouts.wait_dump(call)

    def write_learnt(self, step: int, rows: Iterable[tuple[int, Sequence[tuple[Trajectory, TrainedValues]]]]) -> None:
        """Write rows of the data that a step learns from, each with its number."""
        files.write_rollouts(files.locate_rollouts_file(self._run_dir, step, files.ROWS_FOLDER), rows)

    def is_sampled(self, step: int, period: int = 1) -> bool:
        """True for a step whose rows or responses are written.

        These are some SAMPLED_STEPS of every `period`-th step, and the first and the last.
        """
        last = self._facts.max_num_steps
        is_kept = step in (0, 1, last) or step // period % max(1, math.ceil(last / period / SAMPLED_STEPS)) == 0
        return is_kept and self._config.rollouts != "off"

    def read_rows(self, step: int) -> list[dict[str, Any]]:
        """Read logger.num_completions_to_print rows of a step's file."""
        rows = files.read_rows(step, files.locate_rollouts_file(self._run_dir, step))
        return select_first_of_groups(rows, self._config.num_completions_to_print)


def count_within(tokens: Sequence[int], most_rows: int, most_tokens: int) -> int:
    """Count rows of at most `most_tokens`, at least one."""
    count = min(len(tokens), most_rows)
    while count > 1 and sum(tokens[index * len(tokens) // count] for index in range(count)) > most_tokens:
        count -= 1
    return count


def describe_run(config: Config, folder: Path) -> files.RunFacts:
    """Describe a run, with the model in `folder`, for its files of rollouts."""
    loop = config.loop
    return files.RunFacts(
        prompts_per_step=loop.num_prompts_per_step,
        samples_per_prompt=loop.num_generations_per_prompt,
        max_num_steps=loop.max_num_steps,
        vocab=read_policy_shape(config, folder).vocab,
        vocabulary=compute_vocabulary_digest(folder),
    )


_NAMED_PROMPTS = 8  # most prompts that a message names; the file has all of them


@dataclass(frozen=True, slots=True)
class StepCheck:
    """Ends the run if a value of a step is not finite."""

    run_dir: Path
    fetch: Callable[[Sequence[SampledGroup]], list[list[Trajectory]]]
    """Brings the tokens and texts of groups to the driver (`RolloutPool.fetch`)."""
    groups: Sequence[SampledGroup]
    step: int  # or the last step before a validation
    dataset: str = "training"

    def require_finite_samples(self) -> None:
        """Check the sampling log-probabilities (RunError) and the rewards (SamplingError)."""
        outcomes = [outcome for group in self.groups for outcome in group.outcomes]
        bad_logprobs = [index for index, outcome in enumerate(outcomes) if not outcome.finite_logprobs]
        if bad_logprobs:  # the weights themselves may be broken
            self.stop("a sampling log-probability", bad_logprobs)
        functions: set[str] = set()
        bad_rewards = []
        for index, outcome in enumerate(outcomes):
            bad_functions = {name for name, value in outcome.reward_parts.items() if not is_reward(value)}
            functions |= bad_functions
            if bad_functions or not (outcome.reward is None or is_reward(outcome.reward)):
                bad_rewards.append(index)
        if bad_rewards:
            value_name = f"the reward of {', '.join(sorted(functions))}" if functions else "the reward"
            self.stop(value_name, bad_rewards, error=SamplingError)

    def require_finite(self, field: str, is_finite: NDArray[np.bool_], batch: StepBatch) -> None:
        """Check that a field is finite where it is used: [sequences], bool."""
        if is_finite.all():
            return
        bad_sequences = np.flatnonzero(~is_finite).tolist()
        values: dict[int, list[float]] = {}
        if field == "advantages" and batch.advantages is not None:
            values = {sequence: [float(batch.advantages[sequence])] for sequence in bad_sequences}
        else:
            for partition, reference in zip(batch.partitions, batch.fields[field], strict=True):
                for index in np.flatnonzero(np.isin(partition, bad_sequences)):
                    tokens = find_token_indices(batch.lengths[partition], np.array([index]))
                    values[int(partition[index])] = fetch_stored([reference], field)[0][tokens].tolist()
        bad_rollouts = bad_sequences if batch.rollouts is None else batch.rollouts[bad_sequences].tolist()
        in_order = [values[sequence] for sequence in bad_sequences]
        self.stop(f"a value of {field}", bad_rollouts, {field: in_order})

    def stop(
        self,
        value_name: str,
        responses: Sequence[int],
        values: Mapping[str, Sequence[object]] | None = None,
        error: type[RunError] = RunError,
    ) -> NoReturn:
        """Write the offending responses to run_dir/non_finite_step_N.json and end the run.

        `responses`: their indices in the step. `values`: further keys of the file, a value for each response.
        """
        file = self.run_dir / f"non_finite_step_{self.step}.json"
        outcomes: list[Outcome] = [outcome for group in self.groups for outcome in group.outcomes]
        locations = [
            (index, sample) for index, group in enumerate(self.groups) for sample in range(len(group.outcomes))
        ]
        groups = sorted({locations[response][0] for response in responses})
        trajectories = dict(zip(groups, self.fetch([self.groups[group] for group in groups]), strict=True))
        rows = []
        for response in responses:
            group, sample = locations[response]
            # In the file `group` is the group's number in the step, not in its generation batch.
            rows.append({**trajectories[group][sample].to_row(), "group": outcomes[response].group})
        prompts = sorted({outcomes[response].prompt_idx for response in responses})
        content = {"step": self.step, "what": value_name, "data": self.dataset, "prompt_ids": prompts}
        content |= {"trajectories": rows, **(values or {})}
        # NaN, Infinity and -Infinity become strings: JSON has no such numbers.
        write_json(file, json.loads(json.dumps(content), parse_constant=str))
        names = ", ".join(map(str, prompts[:_NAMED_PROMPTS])) + (", ..." if len(prompts) > _NAMED_PROMPTS else "")
        raise error(
            f"step {self.step}: {value_name} is not finite for {len(responses)} response(s) to prompt(s) {names} of "
            f"the {self.dataset} data; no weights were changed by it and nothing of this step was saved; {file} has "
            "the responses"
        )
