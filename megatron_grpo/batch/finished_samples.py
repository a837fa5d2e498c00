"""Samples that were finished when a run ended, kept for its next start.

A start that begins the same request again takes the sample from here: an agent that worked for an hour does not work
again. Only complete samples are kept, before they are scored, so the next start scores them with its own functions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.outside_files import parse_file_json, require_regular
from megatron_grpo.models.image_store import STORE_FOLDER

logger = logging.getLogger(__name__)
PICKLE = b"\x80"  # the first byte of a pickle, and of no JSON
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

    Files are JSON lines. A line that was cut off or damaged counts as absent, and so does a sample with an image that
    the run's folder has no longer: it is drawn again.
    """

    def __init__(self, folder: Path, generation_batch: int, worker: int, versions: range) -> None:
        """Read the samples of earlier starts.

        Args:
            folder: of all batches, on a file system that all nodes share.
            generation_batch: number of the generation batch that is sampled.
            worker: number of the rollout worker, which has a file of its own.
            versions: weights that may have drawn the tokens of a sample which is taken.
        """
        self._versions, self._images = versions, folder.parent / STORE_FOLDER
        self._file = folder / f"batch_{generation_batch}.worker_{worker}.jsonl"
        self._earlier: dict[tuple[int, int, str], tuple[Trajectory, str | None]] = {}
        for file in sorted(folder.glob(f"batch_{generation_batch}.worker_*.jsonl")):
            self._read(file)
        folder.mkdir(exist_ok=True)
        if self._file.exists() and not self._file.read_bytes().endswith(b"\n"):
            with self._file.open("a") as lines:  # a line that a killed worker left unfinished must not spoil the next
                lines.write("\n")

    def find(self, row: int, sample: int, digest: str) -> tuple[Trajectory, bytes | None] | None:
        """Find an earlier start's sample, with its environment's state."""
        earlier = self._earlier.get((row, sample, digest))
        if earlier is None:
            return None
        trajectory, state = earlier
        # A run that goes back to a checkpoint first comes to steps before those that drew these tokens. Their weights
        # are not there yet: the sample is drawn again now, and a later step finds its own.
        if trajectory.oldest_version not in self._versions or trajectory.version not in self._versions:
            return None
        return trajectory, None if state is None else state.encode()

    def add(self, trajectory: Trajectory, state: bytes | None, digest: str) -> None:
        """Keep a sample, unless its environment's state is pickled."""
        if state is not None and state.startswith(PICKLE):  # what a file holds must not be unpickled
            logger.info("a finished sample of %s is not kept: its state is no JSON", trajectory.task_name)
            return
        text = None if state is None else state.decode()
        line = {"digest": digest, "state": text, "trajectory": trajectory.to_saved_row()}
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
        is_sound = trajectory.finite_logprobs and trajectory.failure is None and isinstance(state, str | None)
        if is_sound and all((self._images / image.digest).is_file() for image in trajectory.images):
            key = trajectory.prompt_idx, trajectory.sample, str(record["digest"])
            self._earlier[key] = trajectory, state
