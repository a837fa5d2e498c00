"""Names of the figures that Prometheus gets, and that the dashboard asks only for such names."""

import json
import re
from importlib import resources
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_grpo.config.metric_names import list_possible_metrics
from megatron_grpo.config.schema import Config
from megatron_grpo.observability import prometheus
from megatron_grpo.observability.prometheus import PrometheusTracker, name_series


@pytest.mark.parametrize(
    ("group", "name", "series"),
    [
        ("train", "reward", ("reward", {})),
        ("train", "reward/my.function:x", ("reward_by_name", {"name": "my.function:x"})),
        ("timing", "train", ("phase_seconds", {"phase": "train"})),
        ("validation/timing", "generation", ("val_phase_seconds", {"phase": "generation"})),
        ("validation", "val_accuracy", ("val_accuracy", {})),
        ("throughput", "tokens_per_s", ("tokens_per_s", {})),
        ("train", "ünusual-name", ("_nusual_name", {})),
    ],
)
def test_a_figure_has_a_stable_name(group: str, name: str, series: tuple[str, dict[str, str]]) -> None:
    assert name_series(group, name) == series


class Recorder:
    """A counter or gauge of Ray that keeps what it is given."""

    values: ClassVar[dict[tuple[str, ...], float]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert re.fullmatch(r"megatron_grpo_\w+", name)
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.values[self.name, *tags.values()] = value

    inc = set


def test_a_run_is_running_until_it_ends_and_failed_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.2", "MetricsExportPort": 9000},
        {"Alive": False, "NodeManagerAddress": "10.0.0.3", "MetricsExportPort": 9000},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.util.metrics.Gauge", Recorder)
    monkeypatch.setattr("ray.util.metrics.Counter", Recorder)
    monkeypatch.setattr(prometheus, "MOST_SERIES", 8)
    run, values = tmp_path / "run", Recorder.values
    run.mkdir()
    tracker = PrometheusTracker(run)
    assert json.loads((run / "prometheus_targets.json").read_text())[0]["targets"] == ["10.0.0.2:9000"]
    assert values["megatron_grpo_state", "run", "running"] == 1.0
    tracker.log(3, {"train/reward": 0.5, "train/loss": float("nan"), "alarm/kl_growth": 1.0})
    assert values["megatron_grpo_reward", "run"] == 0.5
    assert values["megatron_grpo_step", "run"] == 3
    assert values["megatron_grpo_alarms", "run", "kl_growth"] == 1.0
    assert ("megatron_grpo_loss", "run") not in values
    tracker.log(4, {f"train/env/{number}": 1.0 for number in range(99)})
    assert len([key for key in values if key[0] == "megatron_grpo_env_by_name"]) == 3, "names are bounded"
    tracker.close(failed=True)
    states = {state: values["megatron_grpo_state", "run", state] for state in ("running", "completed", "failed")}
    assert states == {"running": 0.0, "completed": 0.0, "failed": 1.0}


def test_the_dashboard_asks_for_figures_of_a_run() -> None:
    """An integration test compares them with what a real run exports."""
    dashboard = json.loads((resources.files("megatron_grpo.observability") / "grafana_dashboard.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = set(re.findall(r"ray_megatron_grpo_(\w+)", expressions))
    of_clock = {"phase_seconds", "tokens_per_s", "train_tflops_per_device", "step", "state", "alarms_total"}
    of_engines = {name for name in names if name.startswith("engine_")}
    of_validation = {"val_reward", "val_accuracy"}
    assert names - of_clock - of_engines - of_validation <= set(list_possible_metrics(Config()))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
