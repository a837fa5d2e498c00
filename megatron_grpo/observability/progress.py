"""The progress of a run on the terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_grpo.config.output import tolerant_output

# Metric, label and format of the progress line, in its order.
WATCHED = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("response_length", "length", "{:.1f}"),
    ("kl_penalty", "KL", "{:.4f}"),
    ("token_mult_prob_error", "prob error", "{:.6f}"),
)
ETA_STEPS = 20  # latest steps from whose mean time the remaining time is estimated


class ProgressDisplay:
    """A live line on a terminal, a plain line per step elsewhere."""

    def __init__(self, total_steps: int, *, live: bool, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self._console = console or Console(highlight=False)
        self._recent_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._live: Live | None = None
        if live and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def show_step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show a finished step: the metrics in WATCHED and the seconds of its phases."""
        self._recent_s.append(timing["total"])
        eta = format_duration(fmean(self._recent_s) * (self.total_steps - step))
        figures = [f"{label} {form.format(metrics[name])}" for name, label, form in WATCHED if name in metrics]
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in timing.items() if name != "total")
        times = f"{timing['total']:.2f} s ({phases})" if phases else f"{timing['total']:.2f} s"
        if self._live is None:
            self.print_line("  ".join([f"step {step}/{self.total_steps}", *figures, times, f"ETA {eta}"]))
            return
        bar = ProgressBar(total=self.total_steps, completed=step, width=24)
        head = Table.grid(padding=(0, 2))
        head.add_row(f"[bold]step {step}/{self.total_steps}[/bold]", bar, f"ETA {eta}", times)
        panel = Table.grid()
        panel.add_row(head)
        panel.add_row(Text("  ".join(figures), style="cyan"))
        self._live.update(panel)

    def show_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation; it stays on the screen."""
        figures = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self.print_line(f"validation after step {step}: {figures}")

    def print_line(self, text: str) -> None:
        """Print a line, above the live one."""
        # Lines with prompts and responses may be any text, also text that the console cannot encode.
        with tolerant_output(of_run=True):
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        if self._live is not None:
            self._live.stop()


def format_duration(seconds: float) -> str:
    """2:05 for 125 s, 1:00:00 for an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
