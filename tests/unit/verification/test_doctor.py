"""Planted defects are named, and healthy runs have nothing; the engine of every run is transformers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo import doctor
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.doctor import layer_outputs as hidden_states
from megatron_grpo.verification.doctor.diagnosis import Diagnosis
from megatron_grpo.verification.doctor.examination import examine_run
from megatron_grpo.verification.doctor.prompts import TEMPLATES
from megatron_grpo.verification.doctor.suspects.weights import pursue
from tests.support.rare import rare
from tests.support.recorded_runs import EOS, RecordedRun, edited_copy, make_run, sample_rollouts

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Three versions of a dense model; the last two have checkpoints."""
    run = make_run(tmp_path_factory.mktemp("dense"), "qwen3")
    run.add_version()
    run.add_version()
    return run


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Two versions of a mixture of experts."""
    run = make_run(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    run.add_version()
    return run


def examine_copy(run: RecordedRun, scratch: Path, step: int | None = None) -> Diagnosis:
    scratch.mkdir()
    return examine_run(run.run_dir, run.config, run.versions[0], scratch, step=step)


def only(diagnosis: Diagnosis) -> tuple[str, str]:
    """Cause and name of the single finding."""
    ((cause, name),) = [(finding.cause, finding.name) for finding in diagnosis.findings]
    return cause, name


def tensors(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_a_healthy_run_has_nothing(dense: RecordedRun, tmp_path: Path) -> None:
    dense.write(3, sample_rollouts(dense.versions[2], dense.prompts(), version=2))
    diagnosis = examine_copy(dense, tmp_path / "scratch")
    assert diagnosis.findings == []
    assert (diagnosis.step, diagnosis.version) == (3, 2)
    assert diagnosis.gap.worst < 1e-4
    assert set(diagnosis.sides) == {"engine", "trainer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", *rare(["model.layers.3.self_attn.k_norm.weight"])]
)
def test_a_stale_tensor_is_named(dense: RecordedRun, tmp_path: Path, name: str) -> None:
    old = tensors(dense.versions[1])[name]
    engine = edited_copy(dense.versions[2], tmp_path / "engine", lambda now: now | {name: old})
    dense.write(3, sample_rollouts(engine, dense.prompts(), version=2))
    diagnosis = examine_copy(dense, tmp_path / "scratch")
    assert only(diagnosis) == ("weights", "stale_tensor")
    assert f"kept {name} of version 1" in diagnosis.findings[0].text


@pytest.mark.slow
def test_an_engine_that_is_a_version_behind_is_named(dense: RecordedRun, tmp_path: Path) -> None:
    dense.write(3, sample_rollouts(dense.versions[1], dense.prompts(), version=2))
    diagnosis = examine_copy(dense, tmp_path / "scratch")
    assert only(diagnosis) == ("staleness", "version_behind")
    assert "version 1, 1 version behind" in diagnosis.findings[0].text


@pytest.mark.slow
def test_one_of_two_engines_that_is_a_version_behind_is_named(dense: RecordedRun, tmp_path: Path) -> None:
    behind, right = (sample_rollouts(dense.versions[number], dense.prompts(), version=2) for number in (1, 2))
    dense.write(3, [*behind[:4], *right[4:]])
    diagnosis = examine_copy(dense, tmp_path / "scratch")
    assert only(diagnosis) == ("staleness", "version_behind")
    assert diagnosis.findings[0].text.endswith("(in 4 of 8 rollouts)")


@pytest.mark.slow
@pytest.mark.parametrize("layers", [[2], *rare([[0, 1, 2, 3]])], ids=["one layer", "every layer"])
def test_swapped_gate_and_up_are_named(dense: RecordedRun, tmp_path: Path, layers: list[int]) -> None:
    def swap(now: dict[str, Tensor]) -> dict[str, Tensor]:
        prefixes = [f"model.layers.{layer}.mlp." for layer in layers]
        gates = {f"{prefix}gate_proj.weight": now[f"{prefix}up_proj.weight"] for prefix in prefixes}
        return now | gates | {f"{prefix}up_proj.weight": now[f"{prefix}gate_proj.weight"] for prefix in prefixes}

    dense.write(1, sample_rollouts(edited_copy(dense.versions[0], tmp_path / "engine", swap), dense.prompts()))
    diagnosis = examine_copy(dense, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("weights", "gate_up_swapped")
    assert diagnosis.findings[0].text.endswith("layer 2" if layers == [2] else "every layer")


@pytest.mark.turns(2)
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_missing_temperature_is_named(dense: RecordedRun, tmp_path: Path, side: str) -> None:
    config = replace(dense.config, generation=replace(dense.config.generation, temperature=0.7))
    run = replace(dense, config=config)
    right = sample_rollouts(run.versions[0], run.prompts(), temperature=0.7)
    wrong = sample_rollouts(run.versions[0], run.prompts(), temperature=0.7, reported=1.0)
    trained = [{"prev_logprobs": trajectory.logprobs} for trajectory in (right if side == "engine" else wrong)]
    run.write(1, wrong if side == "engine" else right, trained)
    diagnosis = examine_copy(run, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("sampling", "temperature")
    assert diagnosis.findings[0].text.startswith(f"the {side} does not divide logits by generation.temperature=0.7")


@pytest.mark.turns(2)
def test_a_stop_token_that_was_not_sampled_is_named(dense: RecordedRun, tmp_path: Path) -> None:
    def with_stop(trajectory: Trajectory) -> Trajectory:
        if trajectory.token_ids[-1] == EOS:
            return trajectory
        ((start, end, version),) = trajectory.spans
        ids, logprobs = (
            np.append(trajectory.token_ids, EOS).astype(np.int32),
            np.append(trajectory.logprobs, 0).astype(np.float32),
        )
        return replace(
            trajectory, token_ids=ids, logprobs=logprobs, spans=[Span(start, end + 1, version)], stop_reason="stop"
        )

    rollouts = sample_rollouts(dense.versions[0], dense.prompts())
    assert any(trajectory.token_ids[-1] != EOS for trajectory in rollouts)
    dense.write(1, [with_stop(trajectory) for trajectory in rollouts])
    diagnosis = examine_copy(dense, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("tokens", "stop_token")


@pytest.mark.turns(2)
def test_tokens_behind_a_stop_token_are_found(dense: RecordedRun, tmp_path: Path) -> None:
    rollouts = sample_rollouts(dense.versions[0], dense.prompts())
    rollouts[0].token_ids[rollouts[0].spans[0].start + 1] = EOS
    dense.write(1, rollouts)
    diagnosis = examine_copy(dense, tmp_path / "scratch", step=1)
    assert any(finding.name == "stop_token" and "behind a stop token" in finding.text for finding in diagnosis.findings)


CHATML = "the chat template of ChatML"


@pytest.mark.turns(2)
def test_a_template_of_which_the_engine_alone_knew_is_named(dense: RecordedRun, tmp_path: Path) -> None:
    template = tmp_path / "chatml.jinja"
    template.write_text(TEMPLATES["ChatML"])
    other_config = replace(dense.config, data=replace(dense.config.data, chat_template=str(template)))
    dense.write(1, sample_rollouts(dense.versions[0], dense.prompts(other_config), recorded=dense.prompts()))
    diagnosis = examine_copy(dense, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("tokens", "wrong_template")
    assert CHATML in diagnosis.findings[0].text


@pytest.mark.slow
def test_recorded_prompts_of_another_template_are_named(dense: RecordedRun, tmp_path: Path) -> None:
    plain = replace(dense.config, data=replace(dense.config.data, apply_chat_template=False))
    dense.write(1, sample_rollouts(dense.versions[0], dense.prompts(plain)))
    diagnosis = examine_copy(dense, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("tokens", "wrong_template")
    assert "plain text" in diagnosis.findings[0].text
    assert diagnosis.findings[0].key == "data.apply_chat_template"


def _round_routers(model: Any) -> None:
    """Routers whose products are computed in bfloat16, by code of this test."""
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            gate.forward = _round_gate(gate)


def _round_gate(gate: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1]).bfloat16()
        logits = torch.nn.functional.linear(flat, gate.weight.bfloat16()).float()
        scores, chosen = logits.softmax(-1).topk(gate.top_k)
        return logits, scores / scores.sum(-1, keepdim=True), chosen

    return forward


@pytest.mark.slow
def test_a_router_in_bfloat16_is_named(experts: RecordedRun, tmp_path: Path) -> None:
    experts.write(1, sample_rollouts(experts.versions[0], experts.prompts(), prepare=_round_routers))
    diagnosis = examine_copy(experts, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("routing", "router_precision")


@pytest.mark.slow
def test_a_stale_matrix_of_one_expert_is_named(experts: RecordedRun, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    old = tensors(experts.versions[0])[name]
    engine = edited_copy(experts.versions[1], tmp_path / "engine", lambda now: now | {name: old})
    experts.write(2, sample_rollouts(engine, experts.prompts(), version=1))
    diagnosis = examine_copy(experts, tmp_path / "scratch", step=2)
    assert only(diagnosis) == ("weights", "stale_tensor")
    assert f"kept {name} of version 0" in diagnosis.findings[0].text


@pytest.mark.turns(2)
def test_a_healthy_mixture_of_experts_has_nothing(experts: RecordedRun, tmp_path: Path) -> None:
    experts.write(2, sample_rollouts(experts.versions[1], experts.prompts(), version=1))
    assert examine_copy(experts, tmp_path / "scratch", step=2).findings == []


@pytest.mark.slow
@pytest.mark.parametrize("rope", [LLAMA3], ids=["llama3"])
def test_rotary_embeddings_without_their_scaling_are_named(tmp_path: Path, rope: dict[str, Any]) -> None:
    run = make_run(tmp_path, "llama", rope_parameters=rope)
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    other_run = make_run(tmp_path / "engine", "llama", rope_parameters=plain)  # the same seed, so the same weights
    run.write(1, sample_rollouts(other_run.versions[0], run.prompts()))
    diagnosis = examine_copy(run, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("layer", "rope_scaling")
    assert "without its scaling (rope_type=llama3" in diagnosis.findings[0].text
    run.write(1, sample_rollouts(run.versions[0], run.prompts()))
    assert examine_copy(run, tmp_path / "healthy", step=1).findings == []


@pytest.mark.slow
def test_rounding_to_bfloat16_is_no_finding(tmp_path: Path) -> None:
    run = make_run(tmp_path, "qwen2", "policy.precision=bfloat16")
    run.write(1, sample_rollouts(run.versions[0], run.prompts(), dtype=torch.bfloat16))
    diagnosis = examine_copy(run, tmp_path / "scratch", step=1)
    assert diagnosis.findings == []
    assert diagnosis.gap.mean > 1e-3, "the types do differ"


@pytest.mark.slow
def test_types_of_the_two_sides_that_differ_are_named(dense: RecordedRun, tmp_path: Path) -> None:
    generation = replace(dense.config.generation, engine=replace(dense.config.generation.engine, dtype="bfloat16"))
    run = replace(dense, config=replace(dense.config, generation=generation))
    run.write(1, sample_rollouts(run.versions[0], run.prompts(), dtype=torch.bfloat16))
    assert only(examine_copy(run, tmp_path / "scratch", step=1)) == ("precision", "precision")


class SpoiledRank(PolicyRank):
    """A trainer that multiplies by another matrix in one place than its weights say."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        with torch.no_grad():
            self.chunks[0].decoder.layers[2].mlp.linear_fc2.weight.mul_(torch.linspace(0.9, 1.1, 96))


@pytest.mark.slow
def test_what_no_suspect_explains_is_found_layer_by_layer(
    dense: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "PolicyRank", SpoiledRank)
    dense.write(1, sample_rollouts(dense.versions[0], dense.prompts()))
    diagnosis = examine_copy(dense, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("layer", "first_layer")
    assert "the trainer computes layers.2.mlp differently" in diagnosis.findings[0].text


def top_4(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(4).values[-1], -torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "computed again"])
def test_a_filter_that_training_repeats_is_no_difference(dense: RecordedRun, tmp_path: Path, recorded: bool) -> None:
    """Nor are tokens that it removes in training."""
    run = replace(dense, config=replace(dense.config, generation=replace(dense.config.generation, top_k=4)))
    rollouts = sample_rollouts(run.versions[0], run.prompts(), choose=top_4)
    trained = [{"prev_logprobs": trajectory.logprobs.copy()} for trajectory in rollouts]
    trained[0]["prev_logprobs"][1] = -np.inf
    run.write(1, rollouts, trained if recorded else ())
    diagnosis = examine_copy(run, tmp_path / "scratch", step=1)
    assert diagnosis.findings == []
    assert diagnosis.error == pytest.approx(1.0, abs=1e-3)
    assert any("1 tokens were left out: the filter" in remark for remark in diagnosis.remarks) == recorded


@pytest.mark.slow
def test_a_filter_that_training_does_not_repeat_is_named(dense: RecordedRun, tmp_path: Path) -> None:
    generation = replace(dense.config.generation, top_k=4, bad_words=["never said"])
    run = replace(dense, config=replace(dense.config, generation=generation))
    run.write(1, sample_rollouts(run.versions[0], run.prompts(), choose=top_4))
    diagnosis = examine_copy(run, tmp_path / "scratch", step=1)
    assert only(diagnosis) == ("sampling", "sampling_options")
    assert diagnosis.findings[0].key == "generation.top_k"


def test_the_command(dense: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense.write(1, sample_rollouts(dense.versions[0], dense.prompts(), reported=2.0))
    run_dir = str(dense.run_dir)
    assert doctor.main([run_dir, "step=1", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in answer["findings"]] == ["temperature"]
    assert "has temperature 2" in answer["findings"][0]["text"]
    assert doctor.main([run_dir, "step=1", "generation.temperature=2.0"]) == 0, "both sides are at 2 then"
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{run}", "step=9"], "step=9 is not recorded"),
        (["{run}", "step=x"], "step=x must be"),
        (["{run}", "stepp=1"], "stepp=1 is not an argument; did you mean step=?"),
        (["{run}/no"], "is not the folder of a run"),
        ([], "give the folder of one run"),
        (["{run}", "policy.model.path={run}"], "policy.model.path="),
    ],
)
def test_mistakes_of_the_user(
    dense: RecordedRun, arguments: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dense.write(1, sample_rollouts(dense.versions[0], dense.prompts()[:4]))
    assert doctor.main([argument.replace("{run}", str(dense.run_dir)) for argument in arguments]) == 2
    assert text in capsys.readouterr().err


def test_effects_that_add_up_are_found_together() -> None:
    draw = torch.Generator().manual_seed(0)
    effects = {str(number): torch.randn(50, generator=draw) for number in range(20)}
    gap = effects["3"] + effects["11"] + 0.01 * torch.randn(50, generator=draw)
    assert sorted(pursue(gap, effects)) == ["11", "3"]
    assert pursue(torch.zeros(50), effects) == []
