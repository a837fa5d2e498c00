"""The progress line: the numbers people watch while a run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WATCHED = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("response_length", "length", "{:.1f}"),
    ("kl_penalty", "KL", "{:.4f}"),
    ("token_mult_prob_error", "prob error", "{:.6f}"),
)
"""Metric, label and format, in the order shown; a metric that a run does not have is left out."""

ETA_STEPS = 20
"""Latest steps whose mean time the remaining time is estimated from."""


class Progress:
    """One live line on a terminal, one plain line a step elsewhere. Call `close` at the end."""

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

    def step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show a finished step.

        Args:
            step: number of the step, from 1.
            metrics: value of each metric by name, of which WATCHED are shown.
            timing: seconds by phase, and "total".
        """
        self._recent.append(timing["total"])
        eta = format_duration(fmean(self._recent) * (self.total_steps - step))
        if self._live is None:
            parts = [f"step {step}/{self.total_steps}", *_numbers(metrics), _phases(timing), f"ETA {eta}"]
            self._print("  ".join(parts))
        else:
            self._live.update(self._panel(step, metrics, timing, eta))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation; it stays on the screen."""
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._print(f"validation after step {step}: {numbers}")

    def message(self, text: str) -> None:
        """Print a line, above the live one."""
        self._print(text)

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

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
