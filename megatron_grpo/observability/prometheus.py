"""Figures of a run for Prometheus, through the exporters that Ray has on every machine.

Ray puts `ray_` in front of a name, so `megatron_grpo_reward` is scraped as `ray_megatron_grpo_reward`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.observability.run_files import write_json

TARGETS_FILE = "prometheus_targets.json"  # for file_sd_configs of Prometheus
PREFIX = "megatron_grpo_"
STATES = ("running", "completed", "failed")
MOST_SERIES = 500  # names and labels of a run


class PrometheusTracker:
    """Gauges of the latest figures, with the run's name as the label `run`."""

    def __init__(self, run_dir: Path) -> None:
        import ray
        from ray.util.metrics import Counter, Gauge

        self._gauge, self._run = Gauge, run_dir.resolve().name
        self._gauges: dict[str, Any] = {}
        self._series: set[tuple[str, str]] = set()
        self._alarms = Counter(f"{PREFIX}alarms", "Alarms raised, by name.", ("run", "name"))
        nodes = [node for node in ray.nodes() if node["Alive"] and node.get("MetricsExportPort")]
        targets = sorted(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes)
        write_json(run_dir / TARGETS_FILE, [{"targets": targets, "labels": {"job": "megatron_grpo"}}])
        self._set_state("running")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._set("step", {}, step)
        for key, value in values.items():
            group, _, name = key.partition("/")
            if group == "alarm":
                self._alarms.inc(1.0, {"run": self._run, "name": name})
                continue
            metric, labels = name_series(group, name)
            self._set(metric, labels, value)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: Prometheus has no texts."""

    def close(self, failed: bool) -> None:
        self._set_state("failed" if failed else "completed")

    def _set_state(self, state: str) -> None:
        for name in STATES:
            self._set("state", {"state": name}, float(name == state))

    def _set(self, metric: str, labels: Mapping[str, str], value: float) -> None:
        series = (metric, "".join(labels.values()))
        if not math.isfinite(value) or (series not in self._series and len(self._series) == MOST_SERIES):
            return
        self._series.add(series)
        if metric not in self._gauges:
            text = f"{metric.replace('_', ' ')} of the last step (docs/observing.md)"
            self._gauges[metric] = self._gauge(PREFIX + metric, text, ("run", *labels))
        self._gauges[metric].set(value, {"run": self._run, **labels})


def name_series(group: str, name: str) -> tuple[str, dict[str, str]]:
    """Name the gauge of a tracker's figure, and its labels.

    Example:
        ("validation", "val_accuracy") -> ("val_accuracy", {})
        ("timing", "train") -> ("phase_seconds", {"phase": "train"})
        ("train", "reward/math") -> ("reward_by_name", {"name": "math"})
    """
    if group.endswith("timing"):
        return ("val_" if group.startswith("validation") else "") + "phase_seconds", {"phase": name}
    base, slash, rest = name.partition("/")
    metric = re.sub(r"[^a-zA-Z0-9_]", "_", base)
    return (f"{metric}_by_name", {"name": rest}) if slash else (metric, {})
