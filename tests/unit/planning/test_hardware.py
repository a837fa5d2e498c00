"""Profiles of GPUs: published figures, what some lack, and efficiencies that calibration finds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from megatron_grpo.config.schema import ClusterConfig, Config
from megatron_grpo.planning.calibrate import Measured, fit_hardware, read_measurements, write_profile
from megatron_grpo.planning.costs import time_collective
from megatron_grpo.planning.operation import find_host_memory
from megatron_grpo.planning.pipeline import Timeline
from megatron_grpo.planning.step import StepTimes
from megatron_grpo.planning.whole import find_fp8_problems, find_profile
from megatron_grpo.platform.hardware import Hardware, list_profiles, load_hardware
from megatron_grpo.preflight.node_checks import find_fp8_machine_problems

# NVIDIA's data sheets: GB of memory, TB/s, dense TFLOPS in bfloat16 and FP8, GB/s of NVLink in both directions.
PUBLISHED = {
    "a100": (80, 2.039, 312, None, 600),
    "a100-40gb": (40, 1.555, 312, None, 600),
    "a800": (80, 2.039, 312, None, 400),
    "h20": (96, 4.0, 148, 296, 900),
    "h100": (80, 3.35, 989, 1979, 900),
    "h200": (141, 4.8, 989, 1979, 900),
    "l40s": (48, 0.864, 362, 733, 0),
    "b200": (180, 7.7, 2250, 4500, 1800),
    "b300": (288, 8.0, 2250, 4500, 1800),
    "gb200": (186, 8.0, 2500, 5000, 1800),
}


def test_every_profile_can_be_named() -> None:
    names = get_args(get_args(get_type_hints(ClusterConfig)["gpu"])[0])
    assert set(names) == set(list_profiles()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_those_of_the_data_sheets(name: str) -> None:
    gpu, (memory, speed, bfloat16, fp8, nvlink) = load_hardware(name), PUBLISHED[name]
    assert 0.9 * memory < gpu.memory_gib * 2**30 / 1e9 < 1.08 * memory  # sheets count GB of 10^9 or of 2^30 bytes
    assert gpu.memory_bytes_per_s == pytest.approx(speed * 1e12)
    assert gpu.flops["bfloat16"] == pytest.approx(bfloat16 * 1e12, rel=0.01)
    assert gpu.flops.get("fp8") == (None if fp8 is None else pytest.approx(fp8 * 1e12, rel=0.01))
    assert 2 * gpu.nvlink_bytes_per_s == pytest.approx(nvlink * 1e9)


def test_without_nvlink_messages_within_a_node_go_over_pcie() -> None:
    gpu = load_hardware("l40s")
    seconds = time_collective(gpu, "allgather", 32 * 10**9, tuple(range(8)))
    assert seconds == pytest.approx(7 / 8 / gpu.efficiency.nvlink, rel=0.01)
    with pytest.raises(ValueError, match="neither nvlink_bytes_per_s nor pcie_bytes_per_s"):
        check_changes({"pcie_bytes_per_s": 0.0})


def check_changes(changes: dict[str, float]) -> None:
    from megatron_grpo.platform.hardware import _build_hardware

    _build_hardware(
        "ours", {key: value for key, value in load_hardware("l40s").as_dict().items() if key != "efficiency"} | changes
    )


@pytest.mark.parametrize("name", ["a100", "a100-40gb", "a800"])
def test_fp8_is_refused_on_gpus_without_it_in_the_words_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.cluster.gpus_per_node, config.policy.fp8.format = 8, "hybrid"
    (planned,) = find_fp8_problems(config, load_hardware(name))
    monkeypatch.setattr("megatron_grpo.preflight.node_checks.read_gpu_capability", lambda: (8, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    (problem,) = find_fp8_machine_problems(config)
    assert planned.subject == problem.subject
    assert planned.text == problem.text.replace("this machine", name)


def test_recipes_of_fp8_need_their_own_gpus() -> None:
    config = Config()
    config.policy.fp8.format = "hybrid"
    assert not list(find_fp8_problems(config, load_hardware("l40s")))
    config.policy.fp8.recipe = "blockwise"
    (problem,) = find_fp8_problems(config, load_hardware("l40s"))
    assert problem.text.endswith("use recipe=tensorwise")
    config.policy.fp8.recipe = "mxfp8"
    assert list(find_fp8_problems(config, load_hardware("h20")))
    assert not list(find_fp8_problems(config, load_hardware("b300")))


def test_a_domain_of_nvlink_has_no_more_gpus_than_a_node() -> None:
    config = Config()
    config.cluster.gpus_per_node, config.cluster.gpu = 4, "h100"
    assert find_profile(config).gpus_per_domain == 4
    config.cluster.gpu = "gb200"
    assert find_profile(config).gpus_per_domain == 72


def test_host_memory_is_the_users_or_that_of_the_dgx_system() -> None:
    config = Config()
    config.cluster.gpus_per_node = 8
    assert find_host_memory(config, load_hardware("h100")) == 2048
    assert find_host_memory(config, load_hardware("l40s")) is None
    config.plan.host_memory_gib = 512
    assert find_host_memory(config, replace(load_hardware("l40s"))) == 512


def make_step_times(gpu: Hardware) -> StepTimes:
    """A step of 100 PFLOP, 10 TB of decoding, 1 TB of refit, half a second of the host."""
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
    run = make_step_times(slower).phase_s
    seconds = run | {"train": run["train"] + run["optimizer"], "total": sum(run.values())}
    fit = fit_hardware(Measured(seconds, 61.5, 10), make_step_times, gpu, planned_tensors_gib=60.0)
    reached = fit.hardware.efficiency
    assert (reached.matmul, reached.memory) == pytest.approx((0.4, 0.4), abs=1e-3)  # both of them by one factor
    assert (reached.decode_memory, reached.network) == pytest.approx((0.35, 0.25), abs=1e-3)
    assert fit.hardware.reserve_gib == gpu.reserve_gib + 1.5
    assert {name: after for name, _, _, after in fit.rows} == pytest.approx(
        {"train": seconds["train"], "generation": run["generation"], "refit": run["refit"]}
        | {"step": seconds["total"], "tensors GiB": 61.5},
        rel=1e-3,
    )
    assert "off by" in fit.render_table()[0]


def test_efficiencies_stay_possible() -> None:
    fit = fit_hardware(Measured({"generation": 1e-3}, 0.0, 1), make_step_times, load_hardware("h100"), 60.0)
    assert fit.hardware.efficiency.decode_memory == 1.0
    assert fit.hardware.reserve_gib == load_hardware("h100").reserve_gib


def test_first_steps_are_left_out(tmp_path: Path) -> None:
    seconds = [90.0, 50.0, 4.0, 6.0, 5.0]
    lines = [
        {"step": i, "timing": {"train": second, "total": second}, "throughput": {"gpu_memory_gib": i}}
        for i, second in enumerate(seconds)
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
