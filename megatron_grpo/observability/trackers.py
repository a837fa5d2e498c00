"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, SwanLab, RL-Insight."""

from __future__ import annotations

import hashlib
import html
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.hiding import hide_values
from megatron_grpo.config.keys import build_values, flatten
from megatron_grpo.config.schema import Config
from megatron_grpo.observability.prometheus import PrometheusTracker

Row = Mapping[str, Any]  # a row of a table: values by name of the column
STEP = "step"  # figure of W&B that holds the number of the training step


class TensorBoardTracker:
    """Writes TensorBoard events under run_dir/tensorboard."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # With purge_step TensorBoard hides events that an interrupted run wrote at later steps.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Write a Markdown table, whose cells show plain text, into the Text tab."""
        head = list(rows[0])
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head))]
        lines += ["| " + " | ".join(_format_cell(row[column]) for column in head) + " |" for row in rows]
        self._writer.add_text(name, "\n".join(lines), step)

    def close(self, failed: bool) -> None:
        self._writer.add_text("run/outcome", "failed" if failed else "completed")
        self._writer.close()


class WandbTracker:
    """The run of W&B for a run directory, which a resumed run continues."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise _make_missing_error("wandb") from None
        settings, folder = config.logger.wandb, run_dir.resolve()
        self._wandb = wandb
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                name=settings.name or folder.name,
                id=_compute_run_id(folder),
                resume="allow",
                mode=settings.mode,
                dir=str(run_dir),
                config=list_settings(config),
            )
            # W&B drops figures of a step before its last one, and a resumed run repeats steps. So the number of the
            # step is a figure too, over which W&B draws the others.
            self._run.define_metric("*", step_metric=STEP)
        except wandb.errors.Error as error:
            raise RunError(f"logger.wandb.enabled=true, and W&B does not start: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        head = list(rows[0])
        data = [[_to_plain_value(row[column]) for column in head] for row in rows]
        self._run.log({name: self._wandb.Table(columns=[*head], data=data), STEP: step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """The run of MLflow for a run directory, which a resumed run continues."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _make_missing_error("mlflow") from None
        settings, folder = config.logger.mlflow, run_dir.resolve()
        uri = settings.tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        artifacts = None if settings.tracking_uri else (folder / "mlflow").as_uri()
        for package in ("mlflow", "alembic"):  # they log every table that they create
            logging.getLogger(package).setLevel(logging.WARNING)
        try:
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(settings.experiment)
            experiment_id = experiment.experiment_id if experiment is not None else None
            if experiment_id is None:
                experiment_id = self._client.create_experiment(settings.experiment, artifact_location=artifacts)
            tags = {"run_dir_id": _compute_run_id(folder), "run_dir": str(folder)}
            runs = self._client.search_runs([experiment_id], f"tags.run_dir_id = '{tags['run_dir_id']}'")
            name = settings.name or folder.name
            run = runs[0] if runs else self._client.create_run(experiment_id, tags=tags, run_name=name)
            self._id = run.info.run_id
            self._client.update_run(self._id, status="RUNNING")  # the end of an earlier start has set another status
            # MLflow cannot change a parameter; the report lists changes.
            for key, value in flatten(list_settings(config)):
                if _clean_name(key) not in run.data.params:
                    self._client.log_param(self._id, _clean_name(key), value)
        except MlflowException as error:
            raise RunError(f"logger.mlflow.enabled=true, and MLflow cannot use {uri}: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_clean_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table = [{column: _to_plain_value(value) for column, value in row.items()} for row in rows]
        self._client.log_dict(self._id, {"rows": table}, f"{_clean_name(name)}/step_{step}.json")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class SwanlabTracker:
    """The run of SwanLab for a run directory, which a resumed run continues."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import swanlab
            from swanlab.exceptions import ApiError, AuthenticationError
        except ImportError:
            raise _make_missing_error("swanlab") from None
        settings, folder = config.logger.swanlab, run_dir.resolve()
        self._swanlab: Any = swanlab
        try:
            swanlab.init(
                project=settings.project,
                experiment_name=settings.name or folder.name,
                id=_compute_run_id(folder),
                resume="allow",
                mode=settings.mode,
                logdir=str(folder / "swanlab"),
                config=list_settings(config),
            )
        except (ApiError, AuthenticationError, OSError, RuntimeError, ValueError) as error:
            raise RunError(f"logger.swanlab.enabled=true, and SwanLab does not start: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        head = list(rows[0])
        table = self._swanlab.echarts.Table()
        table.add(head, [[str(row[column]) for column in head] for row in rows])
        self._swanlab.log({name: table}, step=step)

    def close(self, failed: bool) -> None:
        self._swanlab.finish("crashed" if failed else "success")


class RlInsightTracker:
    """Gauges of an RL-Insight server; Ray has to run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import rl_insight
        except ImportError:
            raise _make_missing_error("rl_insight") from None
        settings = config.logger.rl_insight
        self._client: Any = rl_insight
        server = {} if settings.server_url is None else {"server": {"url": settings.server_url}}
        name = settings.name or run_dir.resolve().name
        try:
            rl_insight.init(project=settings.project, experiment_name=name, config=server)
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(f"logger.rl_insight.enabled=true, and RL-Insight does not start: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, STEP: float(step)}.items():
            self._client.metric_gauge(re.sub(r"[^a-zA-Z0-9_]", "_", name), value)

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Do nothing: RL-Insight has no texts."""

    def close(self, failed: bool) -> None:
        self._client.metric_gauge("run_failed", float(failed))
        self._client.finish()


Tracker = TensorBoardTracker | WandbTracker | MlflowTracker | SwanlabTracker | RlInsightTracker | PrometheusTracker


def open_trackers(run_dir: Path, config: Config, resume_step: int | None) -> dict[str, Tracker]:
    """Open the trackers that are enabled, by name.

    Raises RunError if the package of one is missing, or it does not start.
    """
    settings = config.logger
    makers: dict[str, tuple[bool, Callable[[], Tracker]]] = {
        "TensorBoard": (settings.tensorboard, lambda: TensorBoardTracker(run_dir, resume_step)),
        "Wandb": (settings.wandb.enabled, lambda: WandbTracker(run_dir, config)),
        "Mlflow": (settings.mlflow.enabled, lambda: MlflowTracker(run_dir, config)),
        "Swanlab": (settings.swanlab.enabled, lambda: SwanlabTracker(run_dir, config)),
        "RL-Insight": (settings.rl_insight.enabled, lambda: RlInsightTracker(run_dir, config)),
        "Prometheus": (settings.prometheus, lambda: PrometheusTracker(run_dir)),
    }
    return {name: make() for name, (is_enabled, make) in makers.items() if is_enabled}


def _make_missing_error(name: str) -> RunError:
    package = name.replace("_", "-")
    return RunError(f"logger.{name}.enabled=true needs the {name} package: pip install {package}, or set it to false")


def list_settings(config: Config) -> dict[str, Any]:
    """List the settings, with passwords and tokens hidden."""
    settings = hide_values(build_values(config))
    assert isinstance(settings, dict)
    return settings


def _compute_run_id(folder: Path) -> str:
    # A resumed run, which has the same folder, finds its run in the tracker by it.
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def _clean_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)  # MLflow refuses other characters


def _to_plain_value(value: Any) -> Any:
    return value if isinstance(value, int | float | None) else str(value)


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    # Quotes are harmless in a cell, and the entity of an apostrophe has a # that would be escaped again.
    text = re.sub(r"\r\n?|\n", "⏎", html.escape(str(value), quote=False))
    return re.sub(r"([\\`*_{}\[\]()#+\-!|~])", lambda match: f"&#{ord(match[1])};", text)
