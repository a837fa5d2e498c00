"""The replay command on real ranks: layouts agree at float32, and a planted change is found where it was planted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo import replay
from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.verification import problem
from megatron_grpo.verification.replay.compare import TOLERANCES
from tests.support.recorded_run import add_figures, make_recorded_run

KL = {"loss_fn": {"reference_policy_kl_penalty": 0.05}}
LORA = {"policy": {"lora": {"rank": 4, "alpha": 8}}}
STEPS = {"policy": {"train_global_batch_samples": 6, "packing": False}, "grpo": {"seq_logprob_error_threshold": 1e9}}


def run_replay(run_dir: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a replay on the CPU, and its results."""
    code = replay.main([str(run_dir), "step=1", "device=cpu", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def layout(**sizes: Any) -> list[str]:
    return [f"policy.parallel.{name}={str(size).lower()}" for name, size in sizes.items()]


@pytest.mark.parametrize(
    ("family", "settings", "sizes"),
    [
        ("qwen3", KL, {"tensor": 2, "sequence": True}),
        pytest.param("qwen3_moe", {}, {"expert": 2, "data": 2}),
        pytest.param("qwen3", LORA, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3", LORA, {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3", KL, {"pipeline": 2, "virtual_pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, {"context": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param("gemma3", {}, {"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", KL, {"tensor": 2, "sequence": True, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, {"pipeline": 2, "expert": 2, "data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_agree_at_float32(
    family: str, settings: dict[str, Any], sizes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_recorded_run(tmp_path, family, **settings)
    code, report = run_replay(run_dir, capsys, *layout(**sizes))
    (compared,) = report["comparisons"]
    apart = {difference["quantity"]: difference for difference in compared["differences"]}
    assert (code, report["agrees"]) == (0, True), compared
    assert list(apart) == [
        "weights",
        "hidden states",
        "log-probabilities",
        "loss",
        "gradient norm",
        "gradients",
        "update",
    ]
    assert apart["weights"]["difference"] == 0
    differences = {quantity: apart[quantity]["difference"] for quantity in ("hidden states", "gradients")}
    adds_in_another_order = not sizes.keys() <= {"pipeline", "virtual_pipeline"}
    assert any(differences.values()) == adds_in_another_order, "which of the two differs depends on the processor"
    assert differences["hidden states"] <= 2e-5
    assert differences["gradients"] <= 2e-4


@pytest.mark.slow
def test_several_optimizer_steps_and_padded_batches_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_recorded_run(tmp_path, prev=True, **STEPS)
    code, report = run_replay(run_dir, capsys, *layout(data=2), "policy.packing=true")
    of_record, _, changed = report["comparisons"]
    assert (changed["second"], changed["agrees"]) == ("replayed", True), changed
    assert (code, of_record["second"], of_record["agrees"]) == (1, "recorded", False), "the engine's were recorded"
    assert [difference["quantity"] for difference in of_record["differences"]] == ["log-probabilities"]


def change_row(run_dir: Path, tensor: str, change: torch.Tensor | float, row: int) -> str:
    """An override that names a copy of the run's model with one row of a tensor changed."""
    source, target = run_dir.with_name("model"), run_dir.with_name("altered")
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    tensors[tensor][row] += change
    save_file(tensors, file, metadata={"format": "pt"})
    return f"policy.model.path={target}"


def test_one_changed_weight_of_one_layer_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_recorded_run(tmp_path)
    change = torch.zeros(96)
    change[7] = 0.05
    override = change_row(run_dir, "model.layers.2.mlp.down_proj.weight", change, 3)
    code, report = run_replay(run_dir, capsys, override, *layout(pipeline=2))
    (compared,) = report["comparisons"]
    assert code == 1
    assert not report["agrees"]
    point = compared["place"]
    assert (point["quantity"], point["layer"]) == ("weights", 2)
    assert point["tensor"] == "model.layers.2.mlp.down_proj.weight"
    assert point["point"] == "layers.2.mlp"
    hidden = next(difference for difference in compared["differences"] if difference["quantity"] == "hidden states")
    assert (hidden["tensor"], hidden["layer"]) == ("layers.2.mlp", 2)


def test_a_changed_embedding_is_found_at_the_first_token_that_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_recorded_run(tmp_path)
    row = next(iter(read_rollouts(run_dir, 1)))["token_ids"]
    token_id = int(row[4])
    assert token_id not in row[:4]
    code, report = run_replay(run_dir, capsys, change_row(run_dir, "model.embed_tokens.weight", 0.5, token_id))
    point = report["comparisons"][0]["place"]
    assert code == 1
    assert point["tensor"] == "model.embed_tokens.weight"
    assert (point["point"], point["sequence"], point["token"], point["token_id"]) == ("embedding", 0, 4, token_id)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", ["policy.precision=float32"]),
        pytest.param("mixtral", layout(tensor=2, sequence=True), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", layout(tensor=2, sequence=True), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", ["policy.precision=float32"], marks=pytest.mark.slow),
        pytest.param("qwen3", layout(context=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_healthy_bfloat16_steps_agree(
    family: str, changes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With experts too, of which rounding gives some tokens others."""
    run_dir = make_recorded_run(tmp_path, family, policy={"precision": "bfloat16"})
    code, report = run_replay(run_dir, capsys, *changes)
    assert code == 0, report["comparisons"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), [("qwen3", 0), ("llama", 1)])
def test_healthy_bfloat16_steps_of_deep_models_agree(
    family: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(problem.TINY, family, {"model_type": family, "num_hidden_layers": 28 + 4 * seed})
    run_dir = make_recorded_run(tmp_path, family, policy={"precision": "bfloat16"})
    for changes in (["policy.precision=float32"], layout(tensor=2, sequence=True)):
        code, report = run_replay(run_dir, capsys, *changes)
        assert code == 0, report["comparisons"]
    override = change_row(run_dir, f"model.layers.{20 + seed}.mlp.down_proj.weight", 2.0, 3)
    code, report = run_replay(run_dir, capsys, override)
    assert (code, report["comparisons"][0]["place"]["point"]) == (1, f"layers.{20 + seed}.mlp")


def test_an_unrecorded_step_without_changes_is_compared_with_a_second_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_recorded_run(tmp_path)
    code, report = run_replay(run_dir, capsys)
    (compared,) = report["comparisons"]
    assert (code, compared["first"], compared["second"]) == (0, "replayed again", "replayed")
    differences = {difference["quantity"]: difference["difference"] for difference in compared["differences"]}
    assert set(differences) == set(TOLERANCES["float32"])
    assert set(differences.values()) == {0.0}
    assert replay.main([str(run_dir), "step=1", "device=cpu", "baseline=record"]) == 2
    assert "leave baseline=record out" in capsys.readouterr().err


def edit_config(run_dir: Path, **changes: Any) -> None:
    """Change the model's operations behind the record's back."""
    file = run_dir.with_name("model") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 3e4}


@pytest.mark.parametrize(
    ("family", "sizes", "changes", "point"),
    [
        ("qwen3", {}, {"rms_norm_eps": 1e-3}, "layers.0.input_layernorm"),
        pytest.param(
            "gemma3",
            {"tensor": 2, "sequence": True},
            {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
            "layers.1.self_attn.heads",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3", {"context": 2}, {"rope_parameters": ROPE}, "layers.0.self_attn.heads", marks=pytest.mark.slow
        ),
        pytest.param(
            "llama", {"pipeline": 2}, {"rms_norm_eps": 1e-2}, "layers.0.input_layernorm", marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_moe",
            {"expert": 2, "data": 2},
            {"norm_topk_prob": False},
            "layers.0.mlp.router",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma3", {"pipeline": 2}, {"query_pre_attn_scalar": 16}, "layers.0.self_attn.heads", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_changed_operation_is_named_against_the_record(
    family: str,
    sizes: dict[str, Any],
    changes: dict[str, Any],
    point: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The record is made in one layout, and replayed in it and on one rank."""
    run_dir = make_recorded_run(tmp_path, family)
    add_figures(run_dir, *layout(**sizes))
    on_one_rank = [f"policy.parallel.{name}={'false' if name == 'sequence' else 1}" for name in sizes]
    code, report = run_replay(run_dir, capsys, *on_one_rank)
    assert code == 0, report["comparisons"]
    unchanged = next(
        difference
        for difference in report["comparisons"]
        if (difference["first"], difference["second"]) == ("replayed", "recorded")
    )
    hidden = next(difference for difference in unchanged["differences"] if difference["quantity"] == "hidden states")
    assert hidden["difference"] <= 1e-6
    edit_config(run_dir, **changes)
    code, report = run_replay(run_dir, capsys)
    (compared,) = report["comparisons"]
    location = compared["place"]
    assert (code, location["quantity"], location["tensor"], location["point"]) == (1, "hidden states", point, point)
    assert location["layer"] == int(point.split(".")[1])


def test_what_cannot_be_replayed_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_recorded_run(tmp_path, step=2)
    cases = {
        ("step=1",): "has no rollouts in",
        ("step=2",): "begins with the state of",
        ("step=2", "grpo.max_num_steps=3"): "changes nothing in a replay",
        ("step=2", "policy.paralel.tensor=2"): "policy.paralel  unknown key; did you mean",
        (): "step=N is missing",
    }
    for arguments, expected in cases.items():
        assert replay.main([str(run_dir), *arguments]) == 2
        assert expected in capsys.readouterr().err
