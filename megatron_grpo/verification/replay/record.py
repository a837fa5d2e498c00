"""Opens the record of a step: its configuration, the state before it, its rollouts, and what it computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_grpo.batch.replay_files import StepFigures, locate_figures_file, read_figures
from megatron_grpo.batch.rollout_files import (
    DAMAGE_ADVICE,
    examine_file,
    find_recorded_steps,
    locate_rollouts_file,
    read_recorded_rollouts,
    read_rows,
)
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import adopt_families, fetch_model_folder, require_folder
from megatron_grpo.preflight.image_checks import refuse_images
from megatron_grpo.run.checkpoint_files import read_state, verify_checkpoint
from megatron_grpo.run.directory import load_run_config, override_values

_SECTIONS = ("policy.", "loss_fn.")  # keys of a run that start something in a replay


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A recorded step: input of a replay, and results of the run."""

    run_dir: Path
    step: int
    config: Config
    """The configuration of the step, with overrides."""
    checkpoint: Path | None
    """The checkpoint before the step (`checkpoints/step_N-1`); None: the step began with the weights of `model`."""
    model: Path
    """The folder of the policy's model in Hugging Face format."""
    trajectories: list[Trajectory]
    """Rollouts in the order of the step; the samples of a prompt are neighbours."""
    advantages: list[NDArray[np.float32] | None]
    """For each rollout [sampled tokens], float32; None: the step failed before it had any."""
    prev_logprobs: list[NDArray[np.float32] | None]
    """For each rollout [sampled tokens], float32: log-probabilities under the policy at the start of the step, as the
    training framework computed them; None: the step did not compute them."""
    figures: StepFigures | None
    """What the step computed; None: the run did not record it (logger.replay_every)."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[sequences], int64: tokens of each sequence, prompt included."""
        sequences = (sequence for trajectory in self.trajectories for sequence in trajectory.sequences)
        return np.array([tokens for tokens, _ in sequences], dtype=np.int64)

    @property
    def predicts(self) -> NDArray[np.bool_]:
        """True where a token's hidden state reaches a sampled log-probability.

        [tokens], bool. True up to the token before the last sampled one, since later tokens attend to earlier ones. The
        last sampled token, such as a stop token, and an environment's words after it predict nothing.
        """
        lasts = [
            max((span.end for span in sequence.spans if span.end > span.start), default=0)
            for trajectory in self.trajectories
            for sequence in trajectory.split_segments()
        ]
        positions = [np.arange(length) < last - 1 for length, last in zip(self.lengths, lasts, strict=True)]
        return np.concatenate(positions)

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """[tokens], bool: whether the model sampled the token."""
        return self.place_at_sampled([np.ones(trajectory.response_tokens) for trajectory in self.trajectories]) > 0

    def join_tokens(self) -> TokenBatch:
        """Join all rollouts: token_ids (int32), sampled (bool), generation_logprobs (float32)."""
        fields = TokenFields(
            token_ids=torch.from_numpy(np.concatenate([trajectory.token_ids for trajectory in self.trajectories])),
            sampled=torch.from_numpy(self.sampled),
            generation_logprobs=torch.from_numpy(
                self.place_at_sampled([trajectory.logprobs for trajectory in self.trajectories])
            ),
        )
        return TokenBatch(self.lengths.tolist(), fields)

    def place_at_sampled(self, values: Sequence[NDArray[Any] | None]) -> NDArray[np.float32]:
        """Place values of sampled tokens among all tokens, 0 elsewhere.

        From [sampled tokens] of each rollout to [all tokens], float32.

        Raises:
            ValueError: a rollout has no values.
        """
        spread_values = np.zeros(int(self.lengths.sum()), dtype=np.float32)
        ends = np.cumsum([trajectory.tokens for trajectory in self.trajectories])
        for trajectory, trajectory_values, end in zip(self.trajectories, values, ends, strict=True):
            if trajectory_values is None:
                raise ValueError(f"step {self.step} of {self.run_dir} has no such values: it failed, or needed none")
            begin, used = end - len(trajectory.token_ids), 0
            for span in trajectory.spans:
                size = span.end - span.start
                spread_values[begin + span.start : begin + span.end] = trajectory_values[used : used + size]
                used += size
        return spread_values


def open_step(run_dir: Path, step: int, overrides: Sequence[str] = (), *, is_trusted: bool = False) -> RecordedStep:
    """Open the record of one step of a run.

    The configuration is that of the step if the run recorded it (logger.replay_every), else that of the last start.

    Args:
        run_dir: folder of the run.
        step: number of the step, from 1.
        overrides: changes of the configuration, each section.key=VALUE.
        is_trusted: the recorded configuration may start the code that it names.

    Raises:
        ConfigError: an override is wrong, or the record lacks something that a replay needs; the text says what.
        ValueError: a file of the record is damaged.
        RunError: the model cannot be downloaded.
        OSError: a file cannot be read.
    """
    if not run_dir.is_dir():
        raise ConfigError([Problem(f"{run_dir}", "is not the folder of a run")])
    figures = read_figures(locate_figures_file(run_dir, step))
    if figures is None:
        config = load_run_config(run_dir, overrides, is_trusted=is_trusted, sections=_SECTIONS)
    else:
        source = str(locate_figures_file(run_dir, step))
        config = override_values(figures.config, overrides, source, run_dir, is_trusted=is_trusted, sections=_SECTIONS)
        if problems := adopt_families(config, _SECTIONS, run_dir):
            raise ConfigError(problems)
    refuse_images(config, "a replay")
    file = locate_rollouts_file(run_dir, step)
    _require_rollouts(run_dir, step, file)
    rows = list(read_rows(step, file))
    _, groups = read_recorded_rollouts(file)
    model = fetch_model_folder(config.policy.model.path)
    require_folder(str(model))
    return RecordedStep(
        run_dir=run_dir,
        step=step,
        config=config,
        checkpoint=_find_checkpoint_before(run_dir, step, config),
        model=model,
        trajectories=[trajectory for group in groups for trajectory in group],
        advantages=[row["advantages"] for row in rows],
        prev_logprobs=[row["prev_logprobs"] for row in rows],
        figures=figures,
    )


def _require_rollouts(run_dir: Path, step: int, file: Path) -> None:
    """Require that all rollouts of the step are recorded."""
    steps = find_recorded_steps(run_dir)
    if step not in steps:
        recorded = f"there are {min(steps)} to {max(steps)}" if steps else "there are none at all"
        text = f"has no rollouts in {file}: {recorded}; logger.replay_every=N or logger.rollouts=all keeps them"
        raise ConfigError([Problem(f"step={step}", text)])
    try:
        examined = examine_file(file)
    except ValueError as error:
        raise ConfigError([Problem(f"step={step}", f"{file} {error}; {DAMAGE_ADVICE}")]) from None
    run = examined.record.run
    expected = run.prompts_per_step * run.samples_per_prompt
    if examined.rollouts != expected:
        text = (
            f"{file} has {examined.rollouts} of the step's {expected} rollouts: the run kept a sample (logger.rollouts)"
        )
        raise ConfigError([Problem(f"step={step}", text)])


def _find_checkpoint_before(run_dir: Path, step: int, config: Config) -> Path | None:
    """Find the intact checkpoint before a step; None: it began the run."""
    # The checkpoint may also be the one from which the run was resumed, if that is of the step before.
    path = run_dir / "checkpoints" / f"step_{step - 1}"
    resume = config.checkpointing.resume
    if not path.is_dir() and resume not in ("auto", "none"):
        path = Path(resume)
        if path.is_dir() and read_state(path)["save_state"]["total_steps"] != step - 1:
            path = run_dir / "checkpoints" / f"step_{step - 1}"
    elif step == 1:
        return None
    if not path.is_dir():
        steps_with_checkpoint = sorted(
            int(number) + 1
            for folder in (run_dir / "checkpoints").glob("step_*")
            if (number := folder.name.removeprefix("step_")).isdecimal()
        )
        steps = (
            f"steps {', '.join(map(str, steps_with_checkpoint))} have one"
            if steps_with_checkpoint
            else "the run has no checkpoint"
        )
        text = f"begins with the state of {path}, which is not there; {steps}. logger.replay_every=N keeps them"
        raise ConfigError([Problem(f"step={step}", text)])
    try:
        verify_checkpoint(path)
    except RunError as error:
        raise ConfigError([Problem(f"step={step}", f"begins with a checkpoint that cannot be used: {error}")]) from None
    return path
