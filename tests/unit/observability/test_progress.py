"""The console of a run, as a file, a wide and a narrow terminal show it."""

import io
import re

import pytest
from rich.console import Console

from megatron_grpo.observability.progress import LINE_COLUMNS, ProgressDisplay, format_duration

TIMING = {"generation": 0.61, "logprobs": 0.11, "train": 0.52, "refit": 0.08, "logging": 0.01, "total": 1.33}
GRPO = {
    "reward": 0.4123,
    "accuracy": 0.41,
    "loss": -0.00123,
    "grad_norm": 0.853,
    "response_length": 1234.5,
    "kl_penalty": 0.0123,
    "token_mult_prob_error": 1.000123,
    "reward_std": 0.4,
    "value_loss": 0.25,
}
ROWS = {"loss": 0.6931, "grad_norm": 1.25, "preference_accuracy": 0.75, "margin": 0.125, "learning_rate": 1e-6}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def show(steps: int, metrics: dict[str, float], *, width: int, terminal: bool) -> str:
    """Show some steps of 20,000 on a console; the text without control sequences."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=width, highlight=False)
    display = ProgressDisplay(20_000, live=True, console=console)
    for step in range(1, steps + 1):
        display.show_step(step, metrics, TIMING)
    display.print_line("saved")
    display.close()
    display.close()
    text = stream.getvalue()
    assert terminal or not CONTROL.search(text)
    return CONTROL.sub("", text)


@pytest.mark.parametrize("metrics", [GRPO, ROWS])
def test_a_file_has_one_line_of_120_columns_a_step(metrics: dict[str, float]) -> None:
    lines = show(3, metrics, width=40, terminal=False).splitlines()
    assert len(lines) == 4
    assert all(len(line) <= LINE_COLUMNS for line in lines)
    assert lines[0].startswith("step 1/20000  ")
    assert lines[0].endswith("ETA 7:23:19")  # 19,999 steps of 1.33 s


def test_a_line_has_the_figures_of_the_algorithm() -> None:
    ppo = show(1, GRPO, width=120, terminal=False)
    for text in ("reward 0.412", "accuracy 0.410", "loss -0.0012", "value loss 0.2500", "grad 0.853"):
        assert text in ppo
    grpo = show(1, {key: value for key, value in GRPO.items() if key != "value_loss"}, width=120, terminal=False)
    for text in ("loss -0.0012", "grad 0.853", "length 1234.5", "KL 0.0123"):
        assert text in grpo
    pairs = show(1, ROWS, width=120, terminal=False)
    for text in ("preferred 0.750", "loss 0.6931", "margin 0.125", "grad 1.25", "(generation 0.61, train 0.52)"):
        assert text in pairs


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_terminal_keeps_the_history_of_steps(width: int) -> None:
    lines = show(3, GRPO, width=width, terminal=True).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    history = [line for line in lines if re.match(r"step \d/20000  reward 0.412", line)]
    assert [line.split("/")[0] for line in history] == ["step 1", "step 2", "step 3"]
    assert any("ETA 7:23:16" in line for line in lines)


def test_one_slow_step_does_not_move_the_estimate() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(100, live=False, console=Console(file=stream, width=200, highlight=False))
    for step, seconds in enumerate([2.0, 2.0, 60.0, 2.0], start=1):
        display.show_step(step, {}, {"total": seconds})
    assert [line.split("ETA ")[1] for line in stream.getvalue().splitlines()] == ["3:18", "3:16", "3:14", "3:12"]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (125, "2:05"), (3600, "1:00:00"), (59.7, "1:00")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
