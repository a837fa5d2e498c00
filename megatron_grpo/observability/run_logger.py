"""One object for all reports of a run: files, trackers, the progress line, the summary and the plot."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_grpo.batch.figures import MOST_FIGURES, is_of_environment
from megatron_grpo.batch.rollout_files import drop_rollouts_after
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.schema import Config
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.data.prompt_renderer import content_text
from megatron_grpo.observability.page.trajectories import TokenBytes, compute_mean_advantage, load_token_bytes
from megatron_grpo.observability.plots import plot_run
from megatron_grpo.observability.run_files import (
    METRICS_FILE,
    STARTS_FILE,
    VALIDATION_FILE,
    format_json_line,
    open_to_append,
    read_lines,
)
from megatron_grpo.observability.summary import COMPLETED, RunEnd, write_summary
from megatron_grpo.observability.timing import TOTAL
from megatron_grpo.observability.trackers import MlflowTracker, TensorBoardTracker, Tracker, WandbTracker

WATCHED = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("response_length", "length", "{:.1f}"),
    ("kl_penalty", "KL", "{:.4f}"),
    ("token_mult_prob_error", "prob error", "{:.6f}"),
)
"""Metric, label and format of the progress line, in its order; metrics that a run does not have are left out."""

ETA_STEPS = 20
"""Number of latest steps from whose mean time the remaining time is estimated."""


class ProgressDisplay:
    """Progress display: one live line on a terminal, one plain line per step elsewhere. Call `close` at the end."""

    def __init__(self, total_steps: int, *, live: bool, console: Console | None = None) -> None:
        """
        Args:
            total_steps: steps at which the run ends.
            live: redraw one line in place if the console is a terminal.
            console: where to write; standard output if not given.
        """
        self.total_steps = total_steps
        self._console = console or Console(highlight=False)
        self._recent: deque[float] = deque(maxlen=ETA_STEPS)
        self._live: Live | None = None
        if live and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def show_step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show a finished step: the metrics in WATCHED, and the seconds of its phases and in "total"."""
        self._recent.append(timing["total"])
        eta = format_duration(fmean(self._recent) * (self.total_steps - step))
        if self._live is None:
            parts = [f"step {step}/{self.total_steps}", *_numbers(metrics), _phases(timing), f"ETA {eta}"]
            self.print_line("  ".join(parts))
        else:
            self._live.update(self._panel(step, metrics, timing, eta))

    def show_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation; it stays on the screen."""
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self.print_line(f"validation after step {step}: {numbers}")

    def print_line(self, text: str) -> None:
        """Print a line, above the live one."""
        with tolerant_output(of_run=True):  # prompts and responses are shown, which may be any text
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        if self._live is not None:
            self._live.stop()

    def _panel(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float], eta: str) -> Table:
        bar = ProgressBar(total=self.total_steps, completed=step, width=24)
        head = Table.grid(padding=(0, 2))
        head.add_row(f"[bold]step {step}/{self.total_steps}[/bold]", bar, f"ETA {eta}", _phases(timing))
        lines = Table.grid()
        lines.add_row(head)
        lines.add_row(Text("  ".join(_numbers(metrics)), style="cyan"))
        return lines


def format_duration(seconds: float) -> str:
    """2:05 for 125 s, 1:00:00 for an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    return [f"{label} {form.format(metrics[name])}" for name, label, form in WATCHED if name in metrics]


def _phases(timing: Mapping[str, float]) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in timing.items() if name != "total")
    return f"{timing['total']:.2f} s ({phases})" if phases else f"{timing['total']:.2f} s"


SHOWN_CHARACTERS = 2000
"""Most characters of a prompt (its end) and of a response (its beginning) in tables that trackers keep."""


def make_sample_row(prompt: str, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """One sample as a line of a table.

    Args:
        prompt: text of the prompt.
        trajectory: fields of the response by name (`read_rollouts`), with or without advantages.

    Returns:
        Values of prompt, response, reward, correct, advantage (mean over the sampled tokens; None: not known), tokens
        and stop_reason, by name.
    """
    return {
        "prompt": prompt[-SHOWN_CHARACTERS:],
        "response": trajectory["response"][:SHOWN_CHARACTERS],
        "reward": trajectory["reward"],
        "correct": trajectory["correct"],
        "advantage": compute_mean_advantage(trajectory.get("advantages")),
        "tokens": len(trajectory["logprobs"]),
        "stop_reason": trajectory["stop_reason"],
    }


def format_prompt(datum: DatumSpec) -> str:
    """Text of the prompt in its row; for a conversation, every turn with its role."""
    prompt = datum["prompt"]
    return (
        prompt
        if isinstance(prompt, str)
        else "\n".join(f"{turn['role']}: {content_text(turn.get('content'))}" for turn in prompt)
    )


def select_first_of_groups(rows: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first rollout of each of the first `count` prompts among the rollouts of a step."""
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        if len(first) == count:
            break
        first.setdefault(row["group"], row)
    return list(first.values())


logger = logging.getLogger(__name__)

LOGGING = "logging"
"""Phase of the time spent in `log_step`. A step reports the previous step's time, since its own is not known yet."""
TRL_NAMES = {"completion_length": "response_length", "kl": "kl_penalty"}
"""TRL's names of our metrics; each of these metrics is reported under both names."""


class RunLogger:
    """Reports a run to its directory, to trackers and to the terminal."""

    def __init__(self, run_dir: str | Path, config: Config, resume_step: int | None = None) -> None:
        """
        Args:
            run_dir: folder of the run; made when it is missing.
            config: configuration of the run.
            resume_step: step from which the run continues; later lines of the files are dropped. None: a new run.

        Raises:
            RunError: a tracker is enabled, but its package is missing or it does not start.
        """
        self.run_dir = Path(run_dir)
        self.config = config
        self.run_dir.mkdir(parents=True, exist_ok=True)
        last_step = -1 if resume_step is None else resume_step  # step 0 is the validation before training
        self._metrics = open_to_append(self.run_dir / METRICS_FILE, last_step)
        self._validations = open_to_append(self.run_dir / VALIDATION_FILE, last_step)
        drop_rollouts_after(self.run_dir, last_step)
        if resume_step is None:
            (self.run_dir / STARTS_FILE).unlink(missing_ok=True)
        self._trackers: list[Tracker] = []
        if config.logger.tensorboard:
            self._trackers.append(TensorBoardTracker(self.run_dir, resume_step))
        if config.logger.wandb.enabled:
            self._trackers.append(WandbTracker(self.run_dir, config))
        if config.logger.mlflow.enabled:
            self._trackers.append(MlflowTracker(self.run_dir, config))
        self._progress = ProgressDisplay(config.training_loop.max_num_steps, live=config.logger.progress)
        self._noted: set[str] = set()
        self._figures: set[str] = set()
        self._vocabulary: TokenBytes | None = None
        self._logging_s = 0.0
        self._startup_s: float | None = None
        self._startup_parts_s: Mapping[str, float] = {}
        self._end = COMPLETED
        self._started = time.monotonic()
        self._earlier_s = 0.0
        for row in read_lines(self.run_dir / METRICS_FILE):
            self._earlier_s += row["timing"][TOTAL]
            self._figures.update(filter(is_of_environment, row))
        self._resume_step = resume_step

    def log_start(
        self, *, startup_s: float, parts: Mapping[str, float] | None = None, changes: Sequence[str] = ()
    ) -> None:
        """Report that all processes are up and the first step can begin.

        Args:
            startup_s: seconds that the start-up took.
            parts: seconds of each part of the start-up, by name of the part; they may overlap.
            changes: differences from the configuration of the previous start of a resumed run, a line each.
        """
        self._startup_s = startup_s
        self._startup_parts_s = parts or {}
        self._started = time.monotonic()
        now = datetime.now().isoformat(timespec="seconds")
        with (self.run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(format_json_line({"time": now, "resumed_after": self._resume_step, "changes": list(changes)}))
        self.note(f"run directory {self.run_dir}, up after {startup_s:.1f} s")
        if self._resume_step is not None:
            self.note(f"resumed after step {self._resume_step}")
        for change in changes:
            self.note(f"  changed: {change}")

    def log_step(
        self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float], throughput: Mapping[str, float]
    ) -> None:
        """Report one training step to the files, the trackers and the terminal.

        Args:
            step: number of the training step, from 1.
            metrics: value of each metric, by name.
            timing: seconds by phase, and of the whole step as "total" (`StepTimer.seconds`).
            throughput: samples and tokens per second, utilisation.
        """
        begin = time.perf_counter()
        metrics = self._with_bounded_figures(metrics)
        metrics = {**metrics, **{name: metrics[same] for name, same in TRL_NAMES.items() if same in metrics}}
        timing = {**timing, LOGGING: self._logging_s, TOTAL: timing[TOTAL] + self._logging_s}
        self._logging_s = 0.0
        apart = {"timing": timing, "throughput": dict(throughput)}  # these differ between equal runs
        self._metrics.write(format_json_line({"step": step, **metrics, **apart}))
        self._track(step, "train", metrics)
        self._track(step, "timing", timing)
        self._track(step, "throughput", throughput)
        self._progress.show_step(step, metrics, timing)
        logger.info("step %d took %.3f s", step, timing[TOTAL])
        self._logging_s += time.perf_counter() - begin

    def _with_bounded_figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics without figures of environments beyond the first MOST_FIGURES names of the run."""
        kept = {}
        for name, value in metrics.items():
            if is_of_environment(name) and name not in self._figures:
                if len(self._figures) == MOST_FIGURES:
                    text = f"the run has {MOST_FIGURES} figures of environments and reports no others, such as {name}"
                    self.note_once("figures", text)
                    continue
                self._figures.add(name)
            kept[name] = value
        return kept

    def log_validation(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Report a validation after `step` training steps; metrics and timing have the form of `log_step`."""
        self._validations.write(format_json_line({"step": step, **metrics, "timing": dict(timing)}))
        self._track(step, "validation", metrics)
        self._track(step, "validation/timing", timing)
        self._progress.show_validation(step, metrics)

    def show_samples(self, prompts: Sequence[DatumSpec], trajectories: Sequence[Trajectory]) -> None:
        """Print one response to each of the first prompts; prompts without a trajectory are left out."""
        for prompt, trajectory in zip(prompts, trajectories, strict=False):
            answer = prompt["extra_env_info"].get(REFERENCE)
            mark = f"reward {trajectory.reward}"
            if trajectory.correct is not None:
                mark = "right" if trajectory.correct else f"wrong, answer {answer!r}"
            text = prompt["message_log"][-1]["content"]
            self.note(f"  {text!r} -> {trajectory.response!r} ({mark}, {trajectory.stop_reason})")

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples (`make_sample_row`) to the trackers as a table, named "train/completions" for instance."""
        if rows:
            self._tell_trackers(lambda tracker: tracker.table(step, name, rows))

    def show_completions(self, step: int, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """Print responses of a training step beside their prompts, and send them to the trackers.

        Args:
            step: number of the training step.
            trajectories: fields of each trajectory by name, as `read_rollouts` returns them. The prompt is the tokens
                before the first sampled one; its text is empty when the model has no tokenizer.json.
        """
        if self._vocabulary is None:
            self._vocabulary = load_token_bytes(self.config.policy.model.path)
        rows = []
        for one in trajectories:
            prompt_ids = one["token_ids"][: one["spans"][0][0] if one["spans"] else None]
            rows.append(make_sample_row(self._vocabulary.text(prompt_ids) if self._vocabulary else "", one))
        for row in rows:
            self.note(f"  {row['prompt']!r} -> {row['response']!r} (reward {row['reward']}, {row['stop_reason']})")
        self.log_table(step, "train/completions", rows)

    def note(self, text: str) -> None:
        """Print a line, and write it into the driver's log."""
        self._progress.print_line(text)
        logger.info(text)

    def note_once(self, kind: str, text: str) -> None:
        """Print a line unless one of this kind was printed before."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)

    def end_early(self, outcome: Literal["early_stop", "data_used_up"], reason: str) -> None:
        """Record that training ends, not by a failure, before its last step; `finish` writes why into summary.json."""
        self._end = RunEnd(outcome, reason)

    def write_summary(self, end: RunEnd) -> dict[str, Any]:
        """Write summary.json for a run that ends in this way, and return its contents."""
        return write_summary(
            self.run_dir,
            samples_per_step=self.config.samples_per_step,
            end=end,
            startup_s=self._startup_s,
            train_s=self._earlier_s + time.monotonic() - self._started,
            startup_parts_s=self._startup_parts_s,
        )

    def finish(self) -> None:
        """Write summary.json and the plot at the end of training, and print the outcome."""
        summary = self.write_summary(self._end)
        plot = plot_run(self.run_dir)
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        known = before is not None and after is not None
        accuracy = f", held-out accuracy {before:.3f} -> {after:.3f}" if known else ""
        self.note(f"{summary['steps']} steps in {format_duration(summary['train_s'])}{accuracy}; curves in {plot}")

    def close(self, *, failed: bool = False) -> None:
        """Close every file and tracker; idempotent. Trackers are told whether the run failed."""
        self._progress.close()
        for file in (self._metrics, self._validations):
            with suppress(OSError):  # a full disk, which has ended the run, refuses the last line
                file.close()
        self._tell_trackers(lambda tracker: tracker.close(failed))
        self._trackers.clear()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _track(self, step: int, group: str, values: Mapping[str, float]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        self._tell_trackers(lambda tracker: tracker.log(step, named))

    def _tell_trackers(self, tell: Callable[[Tracker], None]) -> None:
        """Call every tracker; one that fails is given up, since training does not depend on it."""
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:  # a tracker may raise anything: file, network or own errors
                self._trackers.remove(tracker)
                logger.warning("a tracker failed", exc_info=error)
                name = type(tracker).__name__.removesuffix("Tracker")
                self.note(
                    f"{name} gets no more figures, and the run goes on without it: {type(error).__name__}: {error}"
                )
