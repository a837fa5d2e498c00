"""Calibration finds the efficiencies of a run that another profile has made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.planning.calibrate import Measured, fit_hardware, read_measurements, write_profile
from megatron_grpo.planning.pipeline import Timeline
from megatron_grpo.planning.step import StepTimes
from megatron_grpo.platform.hardware import Hardware, load_hardware


def planned(gpu: Hardware) -> StepTimes:
    """A step of known work: 100 PFLOP, 10 TB of decoding, 1 TB of refit, half a second of the host."""
    reached = gpu.efficiency
    phases = {
        "generation": 10e12 / (gpu.memory_bytes_per_s * reached.decode_memory),
        "train": 100e15 / (gpu.flops["bfloat16"] * reached.matmul) + 0.5,
        "optimizer": 1e12 / (gpu.memory_bytes_per_s * reached.memory),
        "refit": 1e12 / (gpu.network_bytes_per_s * reached.network),
    }
    return StepTimes(phases, sum(phases.values()), None, 1e6, 8, 1.0, 1, [], Timeline(0.0, ()))


def test_a_run_of_a_slower_gpu_gives_back_its_efficiencies() -> None:
    gpu = load_hardware("h100")
    slower = replace(
        gpu, efficiency=replace(gpu.efficiency, matmul=0.4, memory=0.4, decode_memory=0.35, network=0.25, nvlink=0.2)
    )
    run = planned(slower).phase_s
    seconds = run | {"train": run["train"] + run["optimizer"], "total": sum(run.values())}
    found = fit_hardware(Measured(seconds, 61.5, 10), planned, gpu, planned_tensors_gib=60.0)
    reached = found.hardware.efficiency
    assert (reached.matmul, reached.memory) == pytest.approx((0.4, 0.4), abs=1e-3)  # both of them by one factor
    assert (reached.decode_memory, reached.network) == pytest.approx((0.35, 0.25), abs=1e-3)
    assert found.hardware.reserve_gib == gpu.reserve_gib + 1.5
    assert {name: after for name, _, _, after in found.rows} == pytest.approx(
        {"train": seconds["train"], "generation": run["generation"], "refit": run["refit"]}
        | {"step": seconds["total"], "tensors GiB": 61.5},
        rel=1e-3,
    )
    assert "off by" in found.render_table()[0]


def test_efficiencies_stay_possible() -> None:
    found = fit_hardware(Measured({"generation": 1e-3}, 0.0, 1), planned, load_hardware("h100"), 60.0)
    assert found.hardware.efficiency.decode_memory == 1.0
    assert found.hardware.reserve_gib == load_hardware("h100").reserve_gib


def test_first_steps_are_left_out(tmp_path: Path) -> None:
    seconds = [90.0, 50.0, 4.0, 6.0, 5.0]
    lines = [
        {"step": i, "timing": {"train": one, "total": one}, "throughput": {"gpu_memory_gib": i}}
        for i, one in enumerate(seconds)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_measurements(tmp_path) == Measured({"train": 5.0, "total": 5.0}, 4, 3)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match="no steps after the first 2"):
        read_measurements(tmp_path)


def test_a_written_profile_is_read_back(tmp_path: Path) -> None:
    ours = replace(load_hardware("a100"), name="ours", reserve_gib=3.25)
    write_profile(tmp_path / "ours.yaml", ours, "ours")
    assert load_hardware(str(tmp_path / "ours.yaml")) == ours
