"""Files that are never half written, and lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_grpo.data.rollout_files import drop_rollouts_after


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON under a temporary name, then rename: readers see the old file or the new one."""
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, then rename: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def json_line(value: dict[str, Any]) -> str:
    """One line of JSON; floats are written so that reading them gives back equal numbers.

    JSON has no infinities and no NaN: they become null.
    """
    return json.dumps(_finite(value)) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none when there is no such file.

    A last line without a line break was cut off by the end of its process and is left out.

    Raises:
        ValueError: a line is no object; the text names file and line.
    """
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [_object(line, f"{path}:{number}") for number, line in enumerate(whole, start=1)]


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is damaged, no line of JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place} is damaged: it holds {type(value).__name__}, and no object")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
STARTS_FILE = "starts.jsonl"


class RunFiles:
    """Appends to the files of a run directory.

    A run that resumes first drops what was written after the step it resumes from, so that its files become those of a
    run that was never interrupted.
    """

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        """
        Args:
            run_dir: folder of the run; made when it is missing.
            resume_step: last step that counts; None for a run from the start, whose validation of step 0 is still to
                come.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        last_step = -1 if resume_step is None else resume_step
        self._starts, self._resume_step = run_dir / STARTS_FILE, resume_step
        if resume_step is None:
            self._starts.unlink(missing_ok=True)
        _keep_steps(run_dir / METRICS_FILE, last_step)
        _keep_steps(run_dir / VALIDATION_FILE, last_step)
        drop_rollouts_after(run_dir, last_step)
        # Line-buffered: a line is on its way to the disk before the next step begins.
        self._metrics = (run_dir / METRICS_FILE).open("a", buffering=1)
        self._validations = (run_dir / VALIDATION_FILE).open("a", buffering=1)

    def add_start(self, changes: Sequence[str]) -> None:
        """One object with the time of a start, the step it resumed after (null: the first start), and its changes."""
        now = datetime.now().isoformat(timespec="seconds")
        row = {"time": now, "resumed_after": self._resume_step, "changes": list(changes)}
        with self._starts.open("a") as file:
            file.write(json_line(row))

    def add_step(
        self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float], throughput: Mapping[str, float]
    ) -> None:
        """One object with the step, its metrics, and apart from these what no run repeats: timing and throughput."""
        row = {"step": step, **metrics, "timing": dict(timing), "throughput": dict(throughput)}
        self._metrics.write(json_line(row))

    def add_validation(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """One object with the step that was validated (0: before training), its metrics, and apart from them timing."""
        self._validations.write(json_line({"step": step, **metrics, "timing": dict(timing)}))

    def close(self) -> None:
        """Idempotent."""
        self._metrics.close()
        self._validations.close()


def _keep_steps(path: Path, last_step: int) -> None:
    """Drop the lines of a file whose "step" is after `last_step`."""
    if path.exists():
        write_text(path, "".join(json_line(row) for row in read_lines(path) if row["step"] <= last_step))
