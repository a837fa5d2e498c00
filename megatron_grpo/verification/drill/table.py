"""Results of a drill: a table for people, and a file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_grpo.observability.run_files import write_json
from megatron_grpo.verification.drill.cells import ACTIONS, PROCESSES
from megatron_grpo.verification.drill.trials import Trial


def format_row(trial: Trial) -> str:
    """Format a trial as a line, with its problems below."""
    seconds = "" if trial.seconds is None else f" in {trial.seconds:.1f} s"
    again = "" if trial.resume_s is None else f", a step {trial.resume_s:.0f} s after the next start"
    code = "" if trial.exit_code is None else f" with exit code {trial.exit_code}{again}"
    message = "" if trial.message is None else f": {trial.message}"
    head = f"{'ok  ' if trial.has_passed else 'FAIL'} {trial.cell!s:<34} {trial.verdict}{seconds}{code}{message}"
    return "\n".join([head, *(f"       {problem}" for problem in trial.problems)])


def format_rows(trials: Sequence[Trial]) -> str:
    """Format a table in Markdown, by process and action."""
    lines = [
        "| Process | Action | Cells | Recovered, s | Ended, s | Next start, s | Failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for process in PROCESSES:
        for action in ACTIONS:
            rows = [trial for trial in trials if (trial.cell.process, trial.cell.action) == (process, action)]
            if rows:
                recovered = [row.seconds for row in rows if row.verdict == "recovered"]
                ended = [row.seconds for row in rows if row.verdict == "ended"]
                resumed = [row.resume_s for row in rows]
                failed = sum(not row.has_passed for row in rows)
                cells = [process, action, len(rows), *map(_format_times, (recovered, ended, resumed)), failed]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _format_times(times: Sequence[float | None]) -> str:
    """Format how many times there are, and their median."""
    present = [seconds for seconds in times if seconds is not None]
    return f"{len(present)}: {statistics.median(present):.0f}" if present else ""


def write_results(
    file: Path, arguments: Sequence[str], trials: Sequence[Trial], problems: Sequence[str] | None = None
) -> None:
    """Write trials and problems as JSON; None: not checked yet."""
    rows = [asdict(trial) | {"cell": str(trial.cell), "passed": trial.has_passed} for trial in trials]
    passed = problems == [] and all(trial.has_passed for trial in trials)
    write_json(file, {"arguments": [*arguments], "passed": passed, "trials": rows, "problems": problems})
