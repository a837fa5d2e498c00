"""The console of a run: a line for each step, and below them on a terminal how far the run is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.outside_text import format_record
from megatron_grpo.observability.run_files import TOTAL

# Metric, label and format of a step's figures, the most telling first: a narrow console leaves out the last.
PROGRESS_METRICS = (
    ("reward", "reward", "{:.3f}"),
    ("preference_accuracy", "preferred", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:z.4f}"),
    ("margin", "margin", "{:.3f}"),
    ("teacher_divergence", "divergence", "{:.4f}"),
    ("value_loss", "value loss", "{:z.4f}"),
    ("grad_norm", "grad", "{:.3g}"),
    ("response_length", "length", "{:.1f}"),
    ("kl_penalty", "KL", "{:.4f}"),
    ("token_mult_prob_error", "prob error", "{:.6f}"),
)
ETA_STEPS = 20  # latest steps whose median time estimates the remaining time
LINE_COLUMNS = 120  # width of a step's line in a file
_GAP = "  "


class ProgressDisplay:
    """A line for each step, and on a terminal a progress bar below."""

    def __init__(self, total_steps: int, *, live: bool, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self._console = console or Console(highlight=False)
        self._recent_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._lock = threading.Lock()  # of standard output, which several threads replace to print
        self._live: Live | None = None
        if live and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def show_step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show a finished step: PROGRESS_METRICS and the seconds of its phases."""
        self._recent_s.append(timing[TOTAL])
        # The median, because a step with a validation, a save or a lost engine says little about the next.
        eta = f"ETA {format_duration(median(self._recent_s) * (self.total_steps - step))}"
        name = f"step {step}/{self.total_steps}"
        figures = [f"{label} {form.format(metrics[key])}" for key, label, form in PROGRESS_METRICS if key in metrics]
        if self._live is None:
            self.print_line(_fit_line(name, figures, timing, eta, LINE_COLUMNS))
            return
        self.print_line(_fit_line(name, figures, timing, "", self._console.width))
        head = Table.grid(padding=(0, 2))
        for _ in range(3):
            head.add_column(no_wrap=True)
        bar = ProgressBar(total=self.total_steps, completed=step, width=24)
        head.add_row(Text(name, style="bold"), bar, f"{eta}, {median(self._recent_s):.2f} s a step")
        self._live.update(head)

    def print_line(self, text: str) -> None:
        """Print a line, above the progress bar."""
        # Lines with prompts and responses may be any text, also text that the console cannot encode.
        with self._lock, tolerant_output(of_run=True):
            self._console.print(Text(format_record(text)), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        if self._live is not None:
            self._live.stop()


def _fit_line(name: str, figures: Sequence[str], timing: Mapping[str, float], eta: str, columns: int) -> str:
    """Join a step's parts to a line of at most `columns`.

    The shortest phases are left out first, then the last figures.
    """
    phases = sorted((phase for phase in timing if phase != TOTAL), key=lambda phase: -timing[phase])
    line = ""
    for figure_count in range(len(figures), -1, -1):
        for phase_count in range(len(phases), -1, -1):
            times = ", ".join(f"{phase} {timing[phase]:.2f}" for phase in phases[:phase_count])
            seconds = f"{timing[TOTAL]:.2f} s" + (f" ({times})" if times else "")
            line = _GAP.join([name, *figures[:figure_count], seconds, *([eta] if eta else [])])
            if len(line) <= columns:
                return line
    return line


def format_duration(seconds: float) -> str:
    """2:05 for 125 s, 1:00:00 for an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
