"""A recording in the place of the loader of training prompts: which steps it has, where in the data each ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config, LoggerConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.rollout_files import (
    RunFacts,
    StepFacts,
    StepRecord,
    recorded_steps,
    rollouts_file,
    rows_of_file,
)
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.observability.run_logger import one_a_group
from megatron_grpo.sampler.pool import RolloutPool
from megatron_grpo.weights.families import shape_of_folder
from megatron_grpo.weights.source import vocabulary_digest


class RecordedSteps:
    """The steps of an earlier run. Its position in the data goes along, so that checkpoints are as that run's."""

    def __init__(self, path: str, prompts_per_batch: int) -> None:
        """
        Args:
            path: folder of the run, or its folder of rollouts.
            prompts_per_batch: prompts that the run sampled together.
        """
        self.path, self.prompts_per_batch = path, prompts_per_batch
        self.epoch = 0
        """Epochs that the run had completed."""
        self.left_out = 0
        """No rows are left out: none are read."""
        self.files: Mapping[int, Path] = recorded_steps(path)
        """The file of each step."""
        self._position: dict[str, Any] = {"epoch": 0}

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """No prompts: the rollouts are there."""
        return iter(())

    def waiting_batches(self) -> Iterator[list[DatumSpec]]:
        """None."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """State of the run's loader after the last step that was read; JSON-serialisable."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of the run's loader after a step."""
        self._position, self.epoch = state, int(state["epoch"])

    def require_reach(self, step: int) -> None:
        """Check that the recording has this step, the next one, or ended before it.

        Raises:
            ConfigError: it begins later.
        """
        if min(self.files) > step:
            text = f"begins with step {min(self.files)}, and this run with step {step}; start from the checkpoint that "
            raise ConfigError([Problem(f"debug.rollouts_from={self.path}", f"{text}the recorded run started from")])

    @property
    def used_up(self) -> str:
        """Why the run ends when no step is left."""
        return f"the recording is used up: {self.path} ends with step {max(self.files)}"


class RolloutDumps:
    """Starts the writing when a step has its advantages; the step is reported only when its rollouts are on disk."""

    def __init__(self, rollouts: RolloutPool, config: LoggerConfig, run_dir: Path, facts: RunFacts) -> None:
        """
        Args:
            rollouts: whose workers write.
            config: which rollouts are written.
            run_dir: the run's folder.
            facts: what the files say of the run.
        """
        self._rollouts, self._config, self._run_dir, self._facts = rollouts, config, run_dir, facts
        self._writing: dict[int, Any] = {}
        self._held: tuple[int, list[SampledGroup], StepBatch, StepFacts] | None = None

    def hold(self, step: int, groups: list[SampledGroup], batch: StepBatch, facts: StepFacts) -> None:
        """Keep the rollouts of a step for `leave`, should it fail before its writing has begun."""
        self._held = (step, groups, batch, facts)

    def begin(self, step: int, groups: list[SampledGroup], batch: StepBatch | None, facts: StepFacts) -> None:
        """Have the rollouts of a step written, as logger.rollouts says which.

        Args:
            step: number of the training step.
            groups: the step's rollouts.
            batch: the step's tensors; None: the step learns nothing from its rollouts.
            facts: what the file says of the rollouts' sampling.
        """
        self._held = None
        if self._config.rollouts != "off":
            limit = self._config.rollouts_sample if self._config.rollouts == "sample" else None
            record = StepRecord(self._facts, facts)
            self._writing[step] = self._rollouts.tokens.dump(step, groups, batch, self._run_dir, record, sample=limit)

    def finish(self, step: int) -> None:
        """Return when the rollouts of a step are on disk.

        Raises:
            RunError: the rollouts could not be written.
        """
        if step in self._writing:
            self._rollouts.tokens.wait_dump(self._writing.pop(step))

    def leave(self) -> None:
        """Return when the rollouts of a step that failed are on disk, with what was known of them by then.

        Raises:
            RunError: the rollouts could not be written.
        """
        if self._held is not None:
            self.begin(*self._held)
        for step in list(self._writing):
            self.finish(step)

    def some(self, step: int) -> list[dict[str, Any]]:
        """Rollouts of a step that is on disk, as many as logger.num_completions_to_print says, as they are read."""
        rows = rows_of_file(step, rollouts_file(self._run_dir, step))
        return one_a_group(rows, self._config.num_completions_to_print)


def run_facts(config: Config, folder: Path) -> RunFacts:
    """What the files of rollouts say of a run; `folder`: that of its model."""
    loop = config.loop
    return RunFacts(
        prompts_per_step=loop.num_prompts_per_step,
        samples_per_prompt=loop.num_generations_per_prompt,
        max_num_steps=loop.max_num_steps,
        vocab=shape_of_folder(folder).vocab,
        vocabulary=vocabulary_digest(folder),
    )
