"""Experiment trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config


class Tracker(Protocol):
    """Takes scalars by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Events under run_dir/tensorboard."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard itself hides what an interrupted run wrote at later steps.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close; idempotent."""
        self._writer.close()


class WandbTracker:
    """One W&B run for the run directory, continued when the directory's run is resumed."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """
        Raises:
            RunError: the wandb package is missing, or it cannot start a run.
        """
        try:
            import wandb
        except ImportError:
            raise RunError(
                "logger.wandb.enabled=true needs the wandb package: pip install wandb, or set it to false"
            ) from None
        settings = config.logger.wandb
        folder = run_dir.resolve()
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                name=settings.name or folder.name,
                id=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(run_dir),
                config=dataclasses.asdict(config),
            )
        except wandb.errors.Error as error:
            raise RunError(f"logger.wandb.enabled=true, and W&B does not start: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All values in one call."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload what is left; idempotent."""
        self._run.finish()
