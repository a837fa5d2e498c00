"""Everything a run reports, behind one object: files, trackers, the progress line, the summary and the plot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_grpo.config.schema import Config
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.observability.page.trajectories import TokenBytes, token_bytes_of
from megatron_grpo.observability.plots import plot_run
from megatron_grpo.observability.progress import Progress, format_duration
from megatron_grpo.observability.run_files import METRICS_FILE, RunFiles, read_lines
from megatron_grpo.observability.summary import COMPLETED, RunEnd, write_summary
from megatron_grpo.observability.timing import TOTAL
from megatron_grpo.observability.trackers import MlflowTracker, TensorBoardTracker, Tracker, WandbTracker

SHOWN_CHARACTERS = 2000
"""Of a prompt's end and of a response's beginning: trackers keep every table for ever."""


def sample_row(prompt: str, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """One sample as a line of a table.

    Args:
        prompt: its text.
        trajectory: fields of the response by name (`read_rollouts`); advantages if there are some.

    Returns:
        prompt, response, reward, correct, advantage (mean over the sampled tokens; None: not known), tokens,
        stop_reason.
    """
    advantages = trajectory.get("advantages")
    return {
        "prompt": prompt[-SHOWN_CHARACTERS:],
        "response": trajectory["response"][:SHOWN_CHARACTERS],
        "reward": trajectory["reward"],
        "correct": trajectory["correct"],
        "advantage": float(np.mean(advantages)) if advantages is not None and len(advantages) else None,
        "tokens": len(trajectory["logprobs"]),
        "stop_reason": trajectory["stop_reason"],
    }


def prompt_text(datum: DatumSpec) -> str:
    """The prompt as its row gives it; of a conversation every turn, with its role."""
    prompt = datum["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def one_a_group(rows: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first sample of each of the first `count` prompts of a step, of its rollouts in their order."""
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    for row in rows:
        if len(found) == count:
            break
        if row["group"] not in seen:
            seen.add(row["group"])
            found.append(row)
    return found


logger = logging.getLogger(__name__)

LOGGING = "logging"
"""Phase under which the time spent here is reported, one step late: that of a step is known only after its line."""
TRL_NAMES = {"completion_length": "response_length", "kl": "kl_penalty"}
"""Metrics that are also reported under another name, for those who know them from TRL."""


class RunLogger:
    """Reports a run to its directory, to trackers and to the terminal."""

    def __init__(self, run_dir: str | Path, config: Config, resume_step: int | None = None) -> None:
        """
        Args:
            run_dir: folder of the run; made when it is missing.
            config: of the run.
            resume_step: step that the run continues from; what the files hold beyond it is dropped. None: it starts.

        Raises:
            RunError: a tracker is enabled whose package is missing.
        """
        self.run_dir = Path(run_dir)
        self.config = config
        self._files = RunFiles(self.run_dir, resume_step)
        self._trackers: list[Tracker] = []
        if config.logger.tensorboard:
            self._trackers.append(TensorBoardTracker(self.run_dir, resume_step))
        if config.logger.wandb.enabled:
            self._trackers.append(WandbTracker(self.run_dir, config))
        if config.logger.mlflow.enabled:
            self._trackers.append(MlflowTracker(self.run_dir, config))
        self._progress = Progress(config.loop.max_num_steps, live=config.logger.progress)
        self._noted: set[str] = set()
        self._vocabulary: TokenBytes | None = None
        self._logging_s = 0.0
        self._startup_s: float | None = None
        self._startup_parts_s: Mapping[str, float] = {}
        self._end = COMPLETED
        self._started = time.monotonic()
        earlier = read_lines(self.run_dir / METRICS_FILE)
        self._earlier_s = sum(step["timing"][TOTAL] for step in earlier)
        self._resume_step = resume_step

    def started(
        self, *, startup_s: float, parts: Mapping[str, float] | None = None, changes: Sequence[str] = ()
    ) -> None:
        """All processes are up and the first step can begin.

        Args:
            startup_s: seconds that it took.
            parts: seconds of each part of the start-up, by name of the part; they may overlap.
            changes: how the configuration differs from the one that a resumed run had before, a line each.
        """
        self._startup_s = startup_s
        self._startup_parts_s = parts or {}
        self._started = time.monotonic()
        self._files.add_start(changes)
        self.note(f"run directory {self.run_dir}, up after {startup_s:.1f} s")
        if self._resume_step is not None:
            self.note(f"resumed after step {self._resume_step}")
        for change in changes:
            self.note(f"  changed: {change}")

    def log_step(
        self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float], throughput: Mapping[str, float]
    ) -> None:
        """One training step.

        Args:
            step: number of the training step, from 1.
            metrics: value of each metric, by name.
            timing: seconds by phase, and all of them as "total" (`StepTimer.seconds`).
            throughput: what follows from timing: samples and tokens per second, utilisation.
        """
        begin = time.perf_counter()
        metrics = {**metrics, **{name: metrics[same] for name, same in TRL_NAMES.items() if same in metrics}}
        timing = {**timing, LOGGING: self._logging_s, TOTAL: timing[TOTAL] + self._logging_s}
        self._logging_s = 0.0
        self._files.add_step(step, metrics, timing, throughput)
        self._track(step, "train", metrics)
        self._track(step, "timing", timing)
        self._track(step, "throughput", throughput)
        self._progress.step(step, metrics, timing)
        logger.info("step %d took %.3f s", step, timing[TOTAL])
        self._logging_s += time.perf_counter() - begin

    def log_validation(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """One validation.

        Args:
            step: training steps before it; 0 is before training.
            metrics: value of each metric, by name.
            timing: seconds by phase, and all of them as "total" (`StepTimer.seconds`).
        """
        self._files.add_validation(step, metrics, timing)
        self._track(step, "validation", metrics)
        self._track(step, "validation/timing", timing)
        self._progress.validation(step, metrics)

    def show_samples(self, prompts: Sequence[DatumSpec], trajectories: Sequence[Trajectory]) -> None:
        """Print responses.

        Args:
            prompts: what was responded to, and perhaps more.
            trajectories: one response to each of the first prompts, in their order.
        """
        for prompt, trajectory in zip(prompts, trajectories, strict=False):
            answer = prompt["extra_env_info"].get(REFERENCE)
            mark = f"reward {trajectory.reward}"
            if trajectory.correct is not None:
                mark = "right" if trajectory.correct else f"wrong, answer {answer!r}"
            text = prompt["message_log"][-1]["content"]
            self.note(f"  {text!r} -> {trajectory.response!r} ({mark}, {trajectory.stop_reason})")

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples to the trackers as a table.

        Args:
            step: number of the training step.
            name: of the table, "train/completions" for one.
            rows: lines of `sample_row`.
        """
        for tracker in self._trackers if rows else ():
            tracker.table(step, name, rows)

    def show_completions(self, step: int, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """Print responses of a training step beside their prompts, and send them to the trackers.

        Args:
            step: number of the training step.
            trajectories: fields of each by name, as `read_rollouts` returns them. What stands before the first sampled
                token is the prompt; its text is empty when the model has no tokenizer.json.
        """
        if self._vocabulary is None:
            self._vocabulary = token_bytes_of(self.config.policy.model.path)
        rows = []
        for one in trajectories:
            prompt_ids = one["token_ids"][: one["spans"][0][0] if one["spans"] else None]
            rows.append(sample_row(self._vocabulary.text(prompt_ids) if self._vocabulary else "", one))
        for row in rows:
            self.note(f"  {row['prompt']!r} -> {row['response']!r} (reward {row['reward']}, {row['stop_reason']})")
        self.log_table(step, "train/completions", rows)

    def note(self, text: str) -> None:
        """Print a line, and write it into the driver's log."""
        self._progress.message(text)
        logger.info(text)

    def note_once(self, kind: str, text: str) -> None:
        """Print a line unless one of this kind was printed before."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)

    def end_early(self, outcome: Literal["early_stop", "data_used_up"], reason: str) -> None:
        """Training ends well, though not at its last step; `finish` writes the reason into summary.json."""
        self._end = RunEnd(outcome, reason)

    def write_summary(self, end: RunEnd) -> dict[str, Any]:
        """Write summary.json of a run that ends like this; its contents."""
        return write_summary(
            self.run_dir,
            samples_per_step=self.config.samples_per_step,
            end=end,
            startup_s=self._startup_s,
            train_s=self._earlier_s + time.monotonic() - self._started,
            startup_parts_s=self._startup_parts_s,
        )

    def finish(self) -> None:
        """Training is over: write summary.json and the plot, and print the outcome."""
        summary = self.write_summary(self._end)
        plot = plot_run(self.run_dir)
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        known = before is not None and after is not None
        accuracy = f", held-out accuracy {before:.3f} -> {after:.3f}" if known else ""
        self.note(f"{summary['steps']} steps in {format_duration(summary['train_s'])}{accuracy}; curves in {plot}")

    def close(self) -> None:
        """Close every file and tracker; idempotent."""
        self._progress.close()
        self._files.close()
        while self._trackers:
            self._trackers.pop().close()

    def _track(self, step: int, group: str, values: Mapping[str, float]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        for tracker in self._trackers:
            tracker.log(step, named)
