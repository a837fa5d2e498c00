"""What a run writes about itself as it goes: metrics, validations, rollouts, TensorBoard and W&B."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LoggerConfig
from megatron_grpo.observability.files import json_line, keep_steps, write_text

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
ROLLOUTS_FOLDER = "rollouts"


class RunLogger:
    """Writes to a run directory. One that resumes first drops what was written after the step it resumes from, so that
    the files of a resumed run equal those of a run that was never interrupted."""

    def __init__(self, run_dir: str | Path, config: LoggerConfig, resume_step: int = 0) -> None:
        """
        Args:
            run_dir: folder of the run; made when it is missing.
            config: which loggers beside the files.
            resume_step: last step that counts; 0 for a new run, whose validation of step 0 is still to come.

        Raises:
            RunError: a logger is enabled whose package is missing.
        """
        self.run_dir = Path(run_dir)
        (self.run_dir / ROLLOUTS_FOLDER).mkdir(parents=True, exist_ok=True)
        self._drop_after(resume_step)
        self._metrics = open(self.run_dir / METRICS_FILE, "a", buffering=1)
        self._validations = open(self.run_dir / VALIDATION_FILE, "a", buffering=1)
        self._tensorboard = _tensorboard_writer(self.run_dir, resume_step) if config.tensorboard else None
        self._wandb = _wandb_run(self.run_dir, config) if config.wandb.enabled else None

    def log_step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """One training step, counted from 1.

        Args:
            step: number of the step.
            metrics: by name; the same on every run of the same configuration.
            timing: seconds by phase, and "total".
        """
        self._metrics.write(json_line({"step": step, **metrics, "timing": dict(timing)}))
        self._scalars(step, "train", metrics)
        self._scalars(step, "timing", timing)

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One validation after `step` training steps; 0 is before training."""
        self._validations.write(json_line({"step": step, **metrics}))
        self._scalars(step, "validation", metrics)

    def log_rollouts(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """The samples of a step, one JSON object a line, as rollouts/step_N.jsonl."""
        write_text(self.run_dir / ROLLOUTS_FOLDER / f"step_{step}.jsonl", "".join(json_line(row) for row in rows))

    def close(self) -> None:
        """Flush and close everything; idempotent."""
        self._metrics.close()
        self._validations.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def _scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(named, step=step)

    def _drop_after(self, step: int) -> None:
        keep_steps(self.run_dir / METRICS_FILE, step)
        # A new run validates before its first step, so nothing of step 0 may be left either.
        keep_steps(self.run_dir / VALIDATION_FILE, step if step else -1)
        for file in (self.run_dir / ROLLOUTS_FOLDER).glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()


def _tensorboard_writer(run_dir: Path, resume_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # Events of later steps, from before the interruption, are dropped by TensorBoard itself.
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)


def _wandb_run(run_dir: Path, config: LoggerConfig) -> Any:
    try:
        import wandb
    except ImportError:
        raise RunError(
            "logger.wandb.enabled=true needs the wandb package: pip install wandb, or set it to false"
        ) from None
    name = config.wandb.name or run_dir.resolve().name
    # The id ties a resumed run to its first part.
    return wandb.init(project=config.wandb.project, name=name, id=name, dir=str(run_dir), resume="allow")
