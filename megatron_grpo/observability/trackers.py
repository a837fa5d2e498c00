"""Experiment trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.keys import flatten
from megatron_grpo.config.schema import Config

Row = Mapping[str, Any]
"""A row of a table: values by name of the column."""
STEP = "step"
"""Figure of W&B that holds the number of the training step."""


class TensorBoardTracker:
    """Writes TensorBoard events under run_dir/tensorboard."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # With purge_step TensorBoard hides events that an interrupted run wrote at later steps.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Write a Markdown table into the Text tab; its cells show responses as plain text."""
        head = list(rows[0])
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head))]
        lines += ["| " + " | ".join(_cell(row[column]) for column in head) + " |" for row in rows]
        self._writer.add_text(name, "\n".join(lines), step)

    def close(self, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


class WandbTracker:
    """One W&B run for the run directory, continued when the directory's run is resumed."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Start or continue the W&B run; RunError: the wandb package is missing, or W&B cannot start a run."""
        try:
            import wandb
        except ImportError:
            raise _package_missing("wandb") from None
        settings = config.logger.wandb
        folder = run_dir.resolve()
        self._wandb = wandb
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                name=settings.name or folder.name,
                id=_identity(folder),
                resume="allow",
                mode=settings.mode,
                dir=str(run_dir),
                config=dataclasses.asdict(config),
            )
            # W&B drops what is logged for a step before its last one, and a resumed run repeats steps: the number of
            # the step is a figure of its own, over which W&B draws the others.
            self._run.define_metric("*", step_metric=STEP)
        except wandb.errors.Error as error:
            raise RunError(f"logger.wandb.enabled=true, and W&B does not start: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all values in one call."""
        self._run.log({**values, STEP: step})

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log one table for each step."""
        head = list(rows[0])
        data = [[_plain(row[column]) for column in head] for row in rows]
        self._run.log({name: self._wandb.Table(columns=[*head], data=data), STEP: step})

    def close(self, failed: bool) -> None:
        """Upload the remaining data, and end the W&B run as finished or failed."""
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """One MLflow run for the run directory, continued when the directory's run is resumed."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Start or continue the MLflow run; RunError: the mlflow package is missing, or its store cannot be used."""
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _package_missing("mlflow") from None
        settings = config.logger.mlflow
        folder = run_dir.resolve()
        uri = settings.tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        artifacts = None if settings.tracking_uri else (folder / "mlflow").as_uri()
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # otherwise they log every table that they create
        try:
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(settings.experiment)
            number = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(settings.experiment, artifact_location=artifacts)
            )
            mine = self._client.search_runs([number], f"tags.run_dir_id = '{_identity(folder)}'")
            tags = {"run_dir_id": _identity(folder), "run_dir": str(folder)}
            run = mine[0] if mine else self._client.create_run(number, tags=tags, run_name=settings.name or folder.name)
            self._id = run.info.run_id
            self._client.update_run(self._id, status="RUNNING")  # the end of an earlier start has set another status
            for key, value in flatten(dataclasses.asdict(config)):
                if _named(key) not in run.data.params:  # MLflow cannot change a parameter; the report lists changes
                    self._client.log_param(self._id, _named(key), value)
        except MlflowException as error:
            raise RunError(f"logger.mlflow.enabled=true, and MLflow cannot use {uri}: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all values in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(_named(name), value, now, step) for name, value in values.items()])

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log one JSON artifact for each step."""
        table = [{column: _plain(value) for column, value in row.items()} for row in rows]
        self._client.log_dict(self._id, {"rows": table}, f"{_named(name)}/step_{step}.json")

    def close(self, failed: bool) -> None:
        """End the MLflow run as finished or failed."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


Tracker = TensorBoardTracker | WandbTracker | MlflowTracker


def _package_missing(name: str) -> RunError:
    return RunError(f"logger.{name}.enabled=true needs the {name} package: pip install {name}, or set it to false")


def _identity(folder: Path) -> str:
    """Identifier of a run folder, by which a resumed run finds its run in the tracker."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def _named(name: str) -> str:
    """Replace the characters of a name that MLflow refuses."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | None) else str(value)


def _cell(value: Any) -> str:
    """Text of a Markdown table cell, with all HTML and Markdown characters escaped."""
    if isinstance(value, float):
        return f"{value:.4g}"
    # Quotes are harmless in a cell, and the entity of an apostrophe has a # that would be escaped again.
    text = re.sub(r"\r\n?|\n", "⏎", html.escape(str(value), quote=False))
    return re.sub(r"([\\`*_{}\[\]()#+\-!|~])", lambda found: f"&#{ord(found[1])};", text)
