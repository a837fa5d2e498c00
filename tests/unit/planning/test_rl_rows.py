"""Plans of steps of reinforcement learning that others have measured (benchmarks/plan_rows.yaml)."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.step import _Model, _time_generation, find_overlap
from megatron_grpo.platform.hardware import load_hardware

BENCHMARKS = Path("benchmarks").resolve()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import plan_rl_rows

    return plan_rl_rows


def test_published_seconds_of_generation(rows: Any) -> None:
    file, errors = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text()), []
    for row in file["rl_rows"]:
        if seconds := row["published"].get("generation"):
            config, shape = rows.build_config(row), rows.shape_of(row["model"], file["models"])
            hardware = load_hardware(row["gpu"])
            model = _Model(config, [], hardware, find_overlap(config))
            planned = _time_generation(config, shape, hardware, find_lengths(config), model).alone_s
            errors.append(abs(planned / seconds - 1))
    assert len(errors) >= 5
    assert statistics.median(errors) <= 0.1
    assert max(errors) <= 0.35


def test_at_most_a_quarter_of_the_rows_has_a_fitted_constant() -> None:
    all_rows = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text())["rl_rows"]
    assert sum(row.get("fitted", False) for row in all_rows) <= len(all_rows) / 4


@pytest.mark.slow  # dry runs of about 40 layers
def test_published_seconds_of_steps(rows: Any) -> None:
    results = rows.evaluate_all()
    summary = rows.summarize(results)
    assert summary["step_all"]["rows"] == len(results)
    assert summary["step_all"]["median"] <= 0.25
    assert summary["step_held_out"]["median"] <= 0.25


def test_layers_of_each_kind_make_up_the_model(rows: Any) -> None:
    models = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text())["models"]
    shape = parse_model_shape(models["nemotron_3_super"])
    runs = rows.choose_runs(shape)
    assert sorted(map(len, runs.values())) == [3, 4, 4, 4]  # Mamba, attention and experts, and one more of each
    for kind, layers in runs.items():
        picked = rows.pick_layers(shape, layers)
        assert [picked.list_kinds(layer) for layer in range(picked.layers)] == [shape.list_kinds(n) for n in layers]
        assert kind is None or sum(shape.list_kinds(layer) == kind for layer in layers) == 2
