"""Reports of a run to files, trackers and the terminal."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.batch.environment_metrics import MAX_METRICS, is_environment_metric
from megatron_grpo.batch.rollout_files import drop_rollouts_after
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.wait_notices import WaitNotices
from megatron_grpo.config.outside_files import open_to_append
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import list_code_folders
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.observability import run_files
from megatron_grpo.observability.alarms import ALARMS_FILE, Alarm, AlarmWatch, cut_alarms, make_row
from megatron_grpo.observability.page.trajectories import TokenBytes, compute_mean_advantage, load_token_bytes
from megatron_grpo.observability.plots import plot_run
from megatron_grpo.observability.progress import ProgressDisplay, format_duration
from megatron_grpo.observability.run_files import TOTAL
from megatron_grpo.observability.step_traces import StepTraces
from megatron_grpo.observability.summary import COMPLETED, RunEnd, describe_change, write_summary
from megatron_grpo.observability.trackers import Tracker, list_settings, open_trackers
from megatron_grpo.observability.user_tracker import make_tracker, open_tracker

logger = logging.getLogger(__name__)

TABLE_CHARACTERS = 2000  # most characters of a prompt (its end) and of a response (its beginning) in trackers' tables
# Phase of the time spent in `log_step`. A step reports the previous step's time, since its own is not known yet.
LOGGING = "logging"
# Metrics that are also reported under the names of TRL.
TRL_NAMES = {"completion_length": "response_length", "kl": "kl_penalty"}


def make_sample_row(prompt: str, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Make a sample's row in the table of a tracker.

    `trajectory`: fields of the response by name (`read_rollouts`), with or without advantages.
    """
    return {
        "prompt": prompt[-TABLE_CHARACTERS:],
        "response": trajectory["response"][:TABLE_CHARACTERS],
        "reward": trajectory["reward"],
        "correct": trajectory["correct"],
        "advantage": compute_mean_advantage(trajectory.get("advantages")),
        "tokens": len(trajectory["logprobs"]),
        "stop_reason": trajectory["stop_reason"],
    }


def describe_code() -> str | None:
    """Describe the commit of the package's checkout; None: it is installed without one."""
    folder = Path(__file__).parents[2]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        if not (folder / ".git").exists():
            return None
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def select_first_of_groups(rows: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Select the first rollout of each of the first `count` groups."""
    first_rows: dict[int, dict[str, Any]] = {}
    for row in rows:
        if len(first_rows) == count:
            break
        first_rows.setdefault(row["group"], row)
    return list(first_rows.values())


class RunLogger:
    """Reports a run to its directory, to trackers and to the terminal."""

    def __init__(self, run_dir: str | Path, config: Config, resume_step: int | None = None) -> None:
        """Open a run's files, cut after `resume_step`; None: a new run.

        Raises RunError if a tracker is enabled, and its package is missing or it does not start.
        """
        self.run_dir = Path(run_dir)
        self.config = config
        self.run_dir.mkdir(parents=True, exist_ok=True)
        last_step = -1 if resume_step is None else resume_step  # step 0 is the validation before training
        for name in (run_files.METRICS_FILE, run_files.VALIDATION_FILE):
            if resume_step is None:
                (self.run_dir / name).unlink(missing_ok=True)
            else:
                run_files.cut_lines(self.run_dir / name, last_step)
        cut_alarms(self.run_dir, last_step)
        self._metrics = open_to_append(self.run_dir / run_files.METRICS_FILE)
        self._validations = open_to_append(self.run_dir / run_files.VALIDATION_FILE)
        drop_rollouts_after(self.run_dir, last_step)
        if resume_step is None:
            (self.run_dir / run_files.STARTS_FILE).unlink(missing_ok=True)
        self._trackers = open_trackers(self.run_dir, config, resume_step)
        if (maker := make_tracker(config.logger, list_code_folders(config))) is not None:
            settings = list_settings(config)
            tracker = open_tracker(maker, run_dir=self.run_dir, settings=settings, resume_step=resume_step)
            self._trackers[maker.setting] = tracker
        self._progress = ProgressDisplay(config.loop.max_num_steps, live=config.logger.progress)
        self._usual_s = 0.0  # seconds of the last step
        self._notices = WaitNotices(lambda text: self._progress.print_line(f"waiting: {text}"))
        self._noted_kinds: set[str] = set()
        self._environment_figures: set[str] = set()
        self._vocabulary: TokenBytes | None = None
        self._logging_s = 0.0
        self._startup_s: float | None = None
        self._startup_parts_s: Mapping[str, float] = {}
        self._end = COMPLETED
        self._begin = time.monotonic()
        self._earlier_s = 0.0
        self._traces = StepTraces(self.run_dir, config.logger.trace_steps, config.logger.otlp_endpoint)
        self._alarm_watch = AlarmWatch(config.samples_per_step, config.logger.alarms_off)
        self.alarms: list[Alarm] = []  # those that began with the last step
        self.stop_reason: str | None = None  # the first alarm of logger.alarms_stop
        rows = run_files.read_metrics(self.run_dir)
        figures = [row | row["throughput"] for row in rows]
        self._alarm_watch.restore(figures, run_files.read_steps(self.run_dir / run_files.VALIDATION_FILE))
        for row in rows:
            self._earlier_s += row["timing"][TOTAL]
            self._environment_figures.update(filter(is_environment_metric, row))
        self._resume_step = resume_step

    def log_start(
        self, *, startup_s: float, parts: Mapping[str, float] | None = None, changes: Sequence[str] = ()
    ) -> None:
        """Report that all processes are up and the first step can begin.

        `parts`: seconds of parts of the start-up, which may overlap. `changes`: settings changed since the last start.
        """
        self._startup_s = startup_s
        self._startup_parts_s = parts or {}
        self._begin = time.monotonic()
        now = datetime.now().isoformat(timespec="seconds")
        with open_to_append(self.run_dir / run_files.STARTS_FILE) as file:
            start = {"time": now, "resumed_after": self._resume_step, "changes": list(changes), "code": describe_code()}
            file.write(run_files.format_json_line(start))
        self.note(f"run directory {self.run_dir}, up after {startup_s:.1f} s")
        self.note(f"its page while it runs: python -m megatron_grpo.watch {self.run_dir}")
        if self._resume_step is not None:
            self.note(f"resumed after step {self._resume_step}")
        for change in changes:
            self.note(f"  changed: {change}")

    def log_step(
        self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float], throughput: Mapping[str, float]
    ) -> None:
        """Report one training step, from 1, to the files, the trackers and the terminal.

        `timing`: seconds by phase, and "total" of the step. `throughput`: samples and tokens per second, utilisation.
        """
        begin = time.perf_counter()
        metrics = self._drop_excess_figures(metrics)
        metrics |= {trl_name: metrics[name] for trl_name, name in TRL_NAMES.items() if name in metrics}
        timing = {**timing, LOGGING: self._logging_s, TOTAL: timing[TOTAL] + self._logging_s}
        self._logging_s = 0.0
        # Figures of the clock differ between equal runs, so they stand apart from the metrics.
        clock_figures = {"timing": timing, "throughput": dict(throughput)}
        self._metrics.write(run_files.format_json_line({"step": step, **metrics, **clock_figures}))
        self._track(step, "train", metrics)
        self._track(step, "timing", timing)
        self._track(step, "throughput", throughput)
        self._usual_s = timing[TOTAL]
        self._notices.restart(self._usual_s)
        self._progress.show_step(step, metrics, timing)
        logger.info("step %d took %.3f s", step, timing[TOTAL])
        self._raise_alarms(step, {**metrics, **throughput})
        self._traces.end_step(step, timing[TOTAL])
        self._logging_s += time.perf_counter() - begin

    def _raise_alarms(self, step: int, metrics: Mapping[str, float]) -> None:
        self.alarms = self._alarm_watch.observe_step({"step": step, **metrics})
        for alarm in self.alarms:
            with open_to_append(self.run_dir / ALARMS_FILE) as file:
                file.write(run_files.format_json_line(make_row(alarm)))
            self.note(f"alarm {alarm.name} in step {step}: {alarm.text}; docs/operations.md says what to do")
            if alarm.name in self.config.logger.alarms_stop and self.stop_reason is None:
                self.stop_reason = f"alarm {alarm.name} (logger.alarms_stop): {alarm.text}"
        if self.alarms:
            self._track(step, "alarm", {alarm.name: 1.0 for alarm in self.alarms})

    def _drop_excess_figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        # An environment may make up a new name in each step, which trackers would keep for the whole run.
        remaining = {}
        for name, value in metrics.items():
            if is_environment_metric(name) and name not in self._environment_figures:
                if len(self._environment_figures) == MAX_METRICS:
                    text = f"the run has {MAX_METRICS} figures of environments and reports no others, such as {name}"
                    self.note_once("figures", text)
                    continue
                self._environment_figures.add(name)
            remaining[name] = value
        return remaining

    def log_validation(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Report a validation after `step` training steps."""
        self._validations.write(run_files.format_json_line({"step": step, **metrics, "timing": dict(timing)}))
        self._alarm_watch.observe_validation({"step": step, **metrics})
        self._track(step, "validation", metrics)
        self._track(step, "validation/timing", timing)
        figures = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._notices.restart(self._usual_s)
        self._progress.print_line(f"validation after step {step}: {figures}")

    def show_samples(self, prompts: Sequence[DatumSpec], trajectories: Sequence[Trajectory]) -> None:
        """Print one response to each of the first prompts that have a trajectory."""
        for prompt, trajectory in zip(prompts, trajectories, strict=False):
            answer = prompt["extra_env_info"].get(REFERENCE)
            mark = f"reward {trajectory.reward}"
            if trajectory.correct is not None:
                mark = "right" if trajectory.correct else f"wrong, answer {answer!r}"
            text = prompt["message_log"][-1]["content"]
            self.note(f"  {text!r} -> {trajectory.response!r} ({mark}, {trajectory.stop_reason})")

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send rows of `make_sample_row` to the trackers, as a table."""
        if rows:
            self._call_trackers(lambda tracker: tracker.log_table(step, name, rows))

    def show_completions(self, step: int, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """Print responses of a step beside their prompts, and send them to the trackers.

        `trajectories`: rows of `read_rollouts`. Prompts are empty when the model has no tokenizer.json.
        """
        if self._vocabulary is None:
            self._vocabulary = load_token_bytes(self.config.policy.model.path)
        rows = []
        for trajectory in trajectories:
            # A prompt is the tokens before the first sampled one.
            prompt_ids = trajectory["token_ids"][: trajectory["spans"][0][0] if trajectory["spans"] else None]
            prompt = self._vocabulary.decode_text(prompt_ids) if self._vocabulary else ""
            row = make_sample_row(prompt, trajectory)
            self.note(f"  {row['prompt']!r} -> {row['response']!r} (reward {row['reward']}, {row['stop_reason']})")
            rows.append(row)
        self.log_table(step, "train/completions", rows)

    def note(self, text: str) -> None:
        """Print a line, and write it into the driver's log."""
        self._notices.restart(self._usual_s)
        self._progress.print_line(text)
        logger.info(text)

    def note_once(self, kind: str, text: str) -> None:
        """Print a line unless one of this kind was printed before."""
        if kind not in self._noted_kinds:
            self._noted_kinds.add(kind)
            self.note(text)

    def end_early(self, outcome: Literal["early_stop", "data_used_up"], reason: str) -> None:
        """Record that training ends well before its last step, for `finish`."""
        self._end = RunEnd(outcome, reason)

    def write_summary(self, end: RunEnd) -> dict[str, Any]:
        """Write summary.json for a run that ends like this; returns its contents."""
        return write_summary(
            self.run_dir,
            samples_per_step=self.config.samples_per_step,
            end=end,
            startup_s=self._startup_s,
            train_s=self._earlier_s + time.monotonic() - self._begin,
            startup_parts_s=self._startup_parts_s,
        )

    def finish(self) -> None:
        """Write summary.json and the plot at the end of training, and print the outcome."""
        summary = self.write_summary(self._end)
        plot = plot_run(self.run_dir, self.config.method.leading_metrics)
        change = describe_change(self.run_dir, summary)
        steps = ", ".join(filter(None, (f"{summary['steps']} steps in {format_duration(summary['train_s'])}", change)))
        self.note(f"{steps}; curves in {plot}")

    def close(self, *, failed: bool = False) -> None:
        """Close every file and tracker; idempotent."""
        self._notices.close()
        self._progress.close()
        for file in (self._metrics, self._validations):
            with suppress(OSError):  # a full disk, which has ended the run, refuses the last line
                file.close()
        self._traces.close()
        self._call_trackers(lambda tracker: tracker.close(failed))
        self._trackers.clear()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _track(self, step: int, group: str, values: Mapping[str, float]) -> None:
        figures = {f"{group}/{name}": value for name, value in values.items()}
        self._call_trackers(lambda tracker: tracker.log(step, figures))

    def _call_trackers(self, call: Callable[[Tracker], None]) -> None:
        # Training does not depend on trackers, so those that fail are dropped.
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker may raise errors of files, networks or its own
                del self._trackers[name]
                logger.warning("a tracker failed", exc_info=error)
                reason = f"{type(error).__name__}: {error}"
                self.note(f"{name} gets no more figures, and the run goes on: {reason}")
