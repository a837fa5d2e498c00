"""Writing the rollouts of a step to the run's folder, while the step goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_grpo.config.schema import Config, LoggerConfig
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.data.recording import RunFacts, StepFacts, StepRecord
from megatron_grpo.data.rollout_files import rollouts_file, rows_of_file
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.models.families import shape_of_folder
from megatron_grpo.models.vocabulary import vocabulary_digest
from megatron_grpo.observability.sample_tables import one_a_group
from megatron_grpo.rollouts.pool import RolloutPool


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
            self._writing[step] = self._rollouts.dump(step, groups, batch, self._run_dir, record, sample=limit)

    def finish(self, step: int) -> None:
        """Return when the rollouts of a step are on disk.

        Raises:
            RunError: the rollouts could not be written.
        """
        if step in self._writing:
            self._rollouts.wait_dump(self._writing.pop(step))

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
