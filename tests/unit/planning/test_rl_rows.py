"""Plans of steps of reinforcement learning that others have measured (benchmarks/plan_rows.yaml)."""

import math
import statistics
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import yaml

from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.step import StepTimes, _Model, _time_generation, find_overlap
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


def _find_row(rows: Any, name: str) -> tuple[dict[str, Any], Any, Any]:
    """A row, its configuration and its model."""
    file = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text())
    (row,) = [row for row in file["rl_rows"] if row["id"] == name]
    return row, rows.build_config(row), rows.shape_of(row["model"], file["models"])


def test_a_refit_that_gathers_every_weight_takes_what_links_and_ports_need(rows: Any) -> None:
    from moves_of_nemo_rl import count_bytes, time_gathered_refit

    _, config, shape = _find_row(rows, "nemo06_dsv3_h100")
    experts, other_bytes = count_bytes(shape)
    assert experts == 2 * 58 * 256 * 3 * 7168 * 2048  # of DeepSeek-V3's 671 billion parameters
    assert experts + other_bytes == pytest.approx(2 * 671.03e9, rel=1e-3)
    # 16 stages exchange a 16th of the experts, and all of the rest, over a port of 50 GB/s; then 16 ranks on two nodes
    # gather the experts over eight ports together, which are slower than NVLink at 450 GB/s.
    port, ports = 50e9 * 0.75, min(8 * 50e9 * 0.75, 450e9 * 0.7)
    seconds = 15 / 16 * (experts / 16 + other_bytes) / port + 15 / 16 * experts / ports
    assert time_gathered_refit(config, shape, load_hardware("h100")) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "published"),
    # NeMo RL, pull request 1379: refits of engines on other GPUs. Qwen3-235B has no such row here, so its layout is the
    # one of its row with shared GPUs.
    [("nemo07_dsv3_h100_async", 14.0), ("nemo07_qwen235b_h100", 5.5)],
)
def test_published_seconds_of_refits_that_gather_every_weight(rows: Any, name: str, published: float) -> None:
    from moves_of_nemo_rl import time_gathered_refit

    _, config, shape = _find_row(rows, name)
    config.generation.placement = "separate"
    seconds = time_gathered_refit(config, shape, load_hardware("h100"))
    assert 0.3 * published <= seconds <= published  # links alone; not the host's work for every tensor


def test_the_optimizers_state_goes_to_pageable_memory(rows: Any) -> None:
    from moves_of_nemo_rl import slow_moves

    _, config, shape = _find_row(rows, "nemo03_llama8b")
    hardware = load_hardware("h100")
    phases = {"train": 1.0, "offload": 10.0, "onload": 10.0}
    times = StepTimes(phases, 21.0, None, 1.0, 8, 0.0, 0, [], None)  # type: ignore[arg-type]
    state = 12 * 8.03e9 / 8
    slow = slow_moves(times, config, shape, hardware).phase_s
    assert slow["offload"] == pytest.approx(10 + state / 1.8e9 - state / 50e9, rel=1e-3)
    assert slow["onload"] == pytest.approx(10 + state / 16.1e9 - state / 50e9, rel=1e-3)
    config.generation.placement = "separate"
    assert slow_moves(times, config, shape, hardware) is times


def test_two_published_means_of_a_model_tell_how_far_its_lengths_spread(rows: Any) -> None:
    short, long = (_find_row(rows, f"nemo07_qwen30b_{name}")[0] for name in ("h100", "40k"))
    sigma, normal = short["sigma"], NormalDist()
    assert sigma == long["sigma"]

    def find_mean(median: float, cut: float) -> float:  # E[min(L, c)] of a log-normal L in closed form
        quantile = math.log(cut / median) / sigma
        mean = median * math.exp(sigma**2 / 2)
        return mean * normal.cdf(quantile - sigma) + cut * (1 - normal.cdf(quantile))

    low, high = 100.0, 100_000.0
    for _ in range(60):
        median = math.sqrt(low * high)
        is_low = find_mean(median, short["longest"] - short["prompt"]) < short["response"]
        low, high = (median, high) if is_low else (low, median)
    assert find_mean(low, long["longest"] - long["prompt"]) == pytest.approx(long["response"], rel=1e-3)


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
