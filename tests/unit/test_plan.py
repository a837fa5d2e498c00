"""The command plan: from a recipe to a verdict, a table, JSON and a page, on a small model."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo import plan
from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.config.command_line import FAILED, MISTAKE
from megatron_grpo.planning.calibrate import write_profile
from megatron_grpo.planning.check import check_fit
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.model_file_checks import explain_unusable_model
from megatron_grpo.run.directory import record_start
from tests.support.config_problems import SMALL
from tests.support.trajectories import make_trajectory

KEYS = {
    "fits",
    "problems",
    "advice",
    "gpus",
    "idle_gpus",
    "host_gib",
    "host_parts_gib",
    "host_memory_gib",
    "routed_bytes_per_token",
    "routed_gib",
    "peak_gib",
    "ranks",
    "step_s",
    "phase_s",
    "tokens_per_s_per_gpu",
    "refit_s",
    "refit_bytes",
    "checkpoints",
    "start_s",
    "assumptions",
}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    raw = {
        **SMALL,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 256,
        "num_hidden_layers": 4,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    lengths = ["data.max_input_seq_length=32", "generation.max_new_tokens=32", "policy.max_total_sequence_length=64"]
    return [
        "+exp=qwen3_8b_8gpu",
        "algorithm=grpo",
        f"policy.model.path={folder}",
        "policy.microbatch_tokens=128",
        *lengths,
    ]


@pytest.mark.parametrize(
    ("further", "text"),
    [
        ([], "a plan needs the GPU: give cluster.gpu=a100"),
        (["cluster.gpu=h100", "cluster.gpus_per_node=0"], "is a run on CPU"),
        (["cluster.gpu=h100", "--fast"], "--fast is not an argument"),
        (["cluster.gpu=v100"], "cluster.gpu=v100"),
        (["cluster.gpu=h100", "policy.model.path=/none"], "policy.model.path=/none  no such folder; give a folder in"),
        (["cluster.gpu=h100", "debug.train=false", "algorithm=grpo"], "debug.train=False  trains nothing"),
        (["cluster.gpu=a800", "policy.fp8.format=hybrid"], "needs GPUs of compute capability 8.9, and a800 has 8.0"),
    ],
)
def test_mistakes_are_one_message(
    overrides: list[str], further: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*overrides, *further]) == MISTAKE
    assert text in capsys.readouterr().err


def test_a_plan_has_every_figure(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert plan.main([*overrides, "cluster.gpu=h100", "cluster.nodes=2", "--json", "--html", str(page)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == KEYS
    assert answer["fits"] is True
    assert [share["stage"] for share in answer["ranks"]] == [0, 1]
    for rank in answer["ranks"]:
        assert rank["peak_gib"] == pytest.approx(max(rank["phases"].values()) + rank["reserve_gib"], abs=2e-3)
        assert rank["phases"].keys() == {"reference", "train", "refit", "checkpoint"}
        assert rank["holders"]
    assert (answer["gpus"], answer["idle_gpus"], answer["advice"]) == (16, 8, None)
    assert answer["peak_gib"] == max(share["peak_gib"] for share in answer["ranks"])
    assert {"generation", "train", "optimizer", "refit"} <= answer["phase_s"].keys()
    assert answer["step_s"] == pytest.approx(sum(answer["phase_s"].values()), rel=0.01)
    text = page.read_text()
    assert "Memory by phase" in text
    assert "fits, 8 of 16 idle" in text
    assert "8 <small>of 16; 8 idle</small>" in text
    assert not re.search(">(offload|onload|logprobs|values)<", text)
    assert "<svg" in text
    assert "http" not in text.partition("</style>")[2]


@pytest.mark.slow
def test_a_search_ranks_layouts_by_their_seconds(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*overrides, "cluster.gpu=h100", "--search", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    seconds = [layout["step_s"] for layout in answer["layouts"] if layout["fits"]]
    assert len(seconds) > 1
    assert seconds == sorted(seconds)
    assert not answer["layouts"][0]["reason"]
    assert all("slower" in layout["reason"] for layout in answer["layouts"][1 : len(seconds)])


def test_an_unknown_family_is_called_that_as_by_check(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    (problem,) = explain_unusable_model(f"policy.model.path={file.parent}", str(file.parent))
    assert "architecture MambaForCausalLM is not supported; supported: Qwen3ForCausalLM" in problem.text
    assert plan.main([*overrides, "cluster.gpu=h100"]) == MISTAKE
    assert " ".join(problem.text.split()) in " ".join(capsys.readouterr().err.split())
    assert [misfit.text for misfit in check_fit(compose_config([*overrides, "cluster.gpu=h100"]))] == [problem.text]


def small_gpu(folder: Path, memory_gib: float) -> str:
    """A profile of this much memory, with which a reserve is left for libraries."""
    file = folder / "tiny.yaml"
    write_profile(file, replace(load_hardware("h100"), memory_gib=memory_gib), "tiny")
    return f"plan.hardware={file}"


def test_check_remarks_on_a_run_that_does_not_fit(overrides: list[str], tmp_path: Path) -> None:
    assert not list(check_fit(compose_config(overrides)))
    (message, *_) = check_fit(compose_config([*overrides, "cluster.gpu=h100", small_gpu(tmp_path, 2.0)]))
    assert message.subject == "cluster.gpu=h100"
    pattern = (
        r"does not fit: rank \d \(pipeline stage \d\) takes [\d.]+ of 2\.0 GiB in \w+; nothing makes it fit: CUDA and "
    )
    assert re.match(pattern, message.text)


@pytest.mark.slow
def test_the_advice_of_a_run_that_does_not_fit_makes_it_fit(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding of a large vocabulary takes a GPU up, until tensor-parallel ranks or the optimizer share it."""
    model = tmp_path / "model" / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | {"vocab_size": 2_000_000, "tie_word_embeddings": True}))
    pretrain = ["plan.workload=pretrain", "plan.global_batch_samples=8", "plan.sequence_length=64"]
    arguments = [*overrides, *pretrain, small_gpu(tmp_path, 3.8)]
    assert plan.main([*arguments, "--json"]) == FAILED
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert advice["fits"]
    assert plan.main([*arguments, *advice["overrides"]]) == 0


@pytest.fixture
def run_dir(overrides: list[str], tmp_path: Path) -> Path:
    """The folder of a run on H100s with one step of rollouts, whose layers take longer than their launch."""
    model = tmp_path / "model" / "config.json"
    wide = {"hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64, "head_dim": 128}
    model.write_text(json.dumps(json.loads(model.read_text()) | wide))
    overrides.append("policy.microbatch_tokens=8192")
    folder = tmp_path / "run"
    folder.mkdir()
    record_start(folder, compose_config([*overrides, "cluster.gpu=h100"]))
    rollouts = [make_trajectory(length, prompt_tokens=16) for length in (8, 16, 24, 32)]
    write_rollouts(locate_rollouts_file(folder, 3), [(0, [(trajectory, {}) for trajectory in rollouts])])
    return folder


@pytest.mark.slow
def test_a_profile_that_is_calibrated_on_a_run_plans_its_seconds(
    overrides: list[str], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(profile: str) -> dict[str, float]:
        assert plan.main([*overrides, profile, f"plan.lengths_from={run_dir}", "--json"]) == 0
        seconds: dict[str, float] = json.loads(capsys.readouterr().out)["phase_s"]
        return seconds

    before = planned("cluster.gpu=h100")
    run = {name: 1.5 * before[name] for name in ("generation", "refit")}
    run["train"] = 1.5 * (before["train"] + before["optimizer"])
    lines = [json.dumps({"step": step, "timing": run | {"total": 0.0}}) + "\n" for step in range(1, 5)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    profile = tmp_path / "ours.yaml"
    assert plan.main(["calibrate", str(run_dir), "--out", str(profile)]) == 0
    assert f"use it as plan.hardware={profile}" in capsys.readouterr().out
    after = planned(f"plan.hardware={profile}")
    assert after["train"] + after["optimizer"] == pytest.approx(run["train"], rel=0.02)
    assert (after["generation"], after["refit"]) == pytest.approx((run["generation"], run["refit"]), rel=0.02)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["{run}", "{run}"], "calibrate takes one RUN_DIR"),
        (["{run}", "cluster.nodes=2"], "cluster.nodes=2: calibrate takes cluster.gpu, policy.model.path and trust_run"),
        (["{run}", "cluster.gpu=v100"], "cluster.gpu=v100"),
        (["{run}", "policy.model.path=/none"], "policy.model.path=/none no such folder"),
        (["{run}"], "has no steps after the first 2"),
        (["/none"], "/none/config.yaml does not exist"),
    ],
)
def test_calibration_names_what_is_missing(
    words: list[str], text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(["calibrate", *(word.format(run=run_dir) for word in words)]) == MISTAKE
    assert text in " ".join(capsys.readouterr().err.split())
