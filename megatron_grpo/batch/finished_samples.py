"""Samples that were finished when a run ended, kept for its next start.

A start that begins the same request again takes the sample from here: an agent that worked for an hour does not work
again. Only complete samples are kept, before they are scored, so the next start scores them with its own functions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.outside_files import parse_file_json, require_regular

FINISHED_FOLDER = "finished_samples"  # in a run's folder
_NAME = re.compile(r"batch_([1-9][0-9]*)\.worker_[0-9]+\.jsonl")


def digest_request(*parts: object) -> str:
    """Compute a digest of what a sample depends on beside its row and number."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def remove_taken(folder: Path, generation_batch: int) -> None:
    """Remove batches up to this one, which a checkpoint has."""
    for file in folder.glob("batch_*.jsonl"):
        name = _NAME.fullmatch(file.name)
        if name is not None and int(name[1]) <= generation_batch:
            file.unlink(missing_ok=True)


class FinishedSamples:
    """The finished samples of one generation batch, in the folder of a run.

    `folder`: of all batches, on a file system that all nodes share. Files are JSON lines; a line that was cut off or
    damaged counts as absent: the sample is drawn again.
    """

    def __init__(self, folder: Path, generation_batch: int, worker: int) -> None:
        self._file = folder / f"batch_{generation_batch}.worker_{worker}.jsonl"
        self._earlier: dict[tuple[int, int, str], tuple[Trajectory, str | None]] = {}
        for file in sorted(folder.glob(f"batch_{generation_batch}.worker_*.jsonl")):
            self._read(file)
        folder.mkdir(exist_ok=True)
        if self._file.exists() and not self._file.read_bytes().endswith(b"\n"):
            with self._file.open("a") as lines:  # a line that a killed worker left unfinished must not spoil the next
                lines.write("\n")

    def find(self, row: int, sample: int, digest: str) -> tuple[Trajectory, str | None] | None:
        """Find an earlier start's sample, with its environment's state in JSON."""
        return self._earlier.get((row, sample, digest))

    def add(self, trajectory: Trajectory, state: str | None, digest: str) -> None:
        """Keep a sample.

        `state`: that of its environment in JSON; None: it has none.
        """
        line = {"digest": digest, "state": state, "trajectory": trajectory.to_saved_row()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, file: Path) -> None:
        require_regular(file)
        with file.open("rb") as lines:
            for line in lines:
                try:
                    self._keep(parse_file_json(line))
                except (ValueError, LookupError, TypeError, AttributeError):
                    continue

    def _keep(self, record: Mapping[str, Any]) -> None:
        trajectory, state = Trajectory.from_row(record["trajectory"]), record["state"]
        if trajectory.finite_logprobs and trajectory.failure is None and isinstance(state, str | None):
            key = trajectory.prompt_idx, trajectory.sample, str(record["digest"])
            self._earlier[key] = trajectory, state
