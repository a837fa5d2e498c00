"""Checkpoints of a run: which exist, how one is written so that it is whole or absent, and which are kept."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import CheckpointingConfig

_STATE_FILE = "state.json"
_LOADER_FILE = "dataloader.pt"


class Checkpointer:
    """The folder run_dir/checkpoints. One process, the driver, owns it."""

    def __init__(self, run_dir: Path, config: CheckpointingConfig) -> None:
        self.config = config
        self.folder = run_dir / "checkpoints"

    def find(self) -> Path | None:
        """The checkpoint to start from, as checkpointing.resume says.

        A run that started from the checkpoint of another one and has saved since goes on from its own newest: a job
        that is queued again starts with the same command line.

        Raises:
            ConfigError: a path was given and no complete checkpoint is there, or the run directory has checkpoints
                beyond the one to start from, which this run would mix with its own.
        """
        resume, steps = self.config.resume, self.steps()
        path = None if resume in ("auto", "none") else Path(resume).resolve()
        of_another_run = path is not None and path.parent != self.folder.resolve()
        if resume == "auto" or (of_another_run and steps):
            return self.path(steps[-1]) if steps else None
        if path is not None and not (path / _STATE_FILE).is_file():
            text = f"is not a checkpoint: it has no {_STATE_FILE}"
            raise ConfigError([Problem(f"checkpointing.resume={resume}", text)])
        begin = 0 if path is None or of_another_run else self.load(path)[0]["save_state"]["total_steps"]
        if steps and steps[-1] > begin:
            text = (
                f"would go on after step {begin}, and {self.folder} has checkpoints of what came after it, up to step "
                f"{steps[-1]}; choose another run_dir, or delete them"
            )
            raise ConfigError([Problem(f"checkpointing.resume={resume}", text)])
        return path

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        names = (re.fullmatch(r"step_(\d+)", entry.name) for entry in self.folder.glob("step_*"))
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        """Folder of a checkpoint."""
        return self.folder / f"step_{step}"

    @contextmanager
    def writing(self, step: int, state: Mapping[str, Any], loader_state: Mapping[str, Any]) -> Iterator[Path]:
        """Write checkpoint `step`: the body adds the models to the yielded folder.

        Everything goes to a temporary name first, which is renamed once all of it is on disk: a checkpoint that can be
        found is complete. Afterwards the ones beyond checkpointing.keep_top_k are removed.

        Args:
            state: what the driver needs to continue (JSON).
            loader_state: of the training data loader.
        """
        temporary = self.folder / f".writing_step_{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        torch.save(dict(loader_state), temporary / _LOADER_FILE)
        (temporary / _STATE_FILE).write_text(json.dumps(dict(state), indent=1))
        for file in (temporary / _LOADER_FILE, temporary / _STATE_FILE):
            _sync(file)
        self._remove(step)
        temporary.rename(self.path(step))
        _sync(self.folder)
        self._prune()

    def update(self, step: int, state: Mapping[str, Any]) -> None:
        """Replace what the driver keeps of a checkpoint, in one piece; the metrics in it may rank it anew."""
        temporary = self.path(step) / f".{_STATE_FILE}.tmp"
        temporary.write_text(json.dumps(dict(state), indent=1))
        _sync(temporary)
        temporary.replace(self.path(step) / _STATE_FILE)
        _sync(self.path(step))
        self._prune()

    @staticmethod
    def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state, loader state) as they were given to `writing`."""
        state = json.loads((path / _STATE_FILE).read_text())
        return state, torch.load(path / _LOADER_FILE, weights_only=True)

    def remove_leftovers(self) -> None:
        """Delete what an interrupted write or removal left behind."""
        for pattern in (".writing_step_*", ".removing_step_*"):
            for entry in self.folder.glob(pattern):
                shutil.rmtree(entry, ignore_errors=True)

    def _prune(self) -> None:
        if self.config.keep_top_k is None:
            return
        steps = self.steps()
        ranked = sorted(steps, key=lambda step: (self._score(step), step), reverse=True)
        for step in set(steps) - set(ranked[: self.config.keep_top_k]) - {steps[-1]}:
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, if it is there: first its name, so that one that can be found is complete."""
        if self.path(step).exists():
            temporary = self.folder / f".removing_step_{step}"
            shutil.rmtree(temporary, ignore_errors=True)
            self.path(step).rename(temporary)
            shutil.rmtree(temporary)

    def _score(self, step: int) -> float:
        """Higher is better; a checkpoint without the metric ranks last."""
        metrics = json.loads((self.path(step) / _STATE_FILE).read_text()).get("metrics", {})
        value = metrics.get(self.config.metric_name)
        if value is None:
            return -math.inf
        return float(value) if self.config.higher_is_better else -float(value)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
