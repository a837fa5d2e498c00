"""The doctor on what a real vLLM engine reported: planted defects are named, and healthy runs have nothing.

One engine with one set of weights is enough for many defects: each run below says something else of these weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.verification.doctor.diagnosis import Diagnosis
from megatron_grpo.verification.doctor.examination import examine_run
from megatron_grpo.verification.doctor.prompts import TEMPLATES
from tests.support.one_engine import ask
from tests.support.recorded_runs import EOS, PROMPTS, SAMPLES, RecordedRun, edited_copy, make_run, move_weights, rollout

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
OPTIONS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def random_model(folder: Path, family: str, **fields: Any) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


class Answers:
    """What the engine answered to prompts of the run's template, and of ChatML, at several temperatures."""

    def __init__(self, folder: Path, run: RecordedRun, **options: Any) -> None:
        template = run.root / "chatml.jinja"
        template.write_text(TEMPLATES["ChatML"])
        other_config = replace(run.config, data=replace(run.config.data, chat_template=str(template)))
        self.prompts, self.chatml = run.prompts(), run.prompts(other_config)
        requests: list[tuple[list[list[int]], dict[str, float]]] = [
            (self.prompts, {}),
            (self.prompts, {"temperature": 0.6}),
            (self.chatml, {}),
            (self.prompts, OPTIONS),
        ]
        calls = [
            {"prompts": [prompt for prompt in ids for _ in range(SAMPLES)], **options_} for ids, options_ in requests
        ]
        self.plain, self.cold, self.of_chatml, self.filtered = ask(folder, calls, **options)

    def rollouts(self, answers: Sequence[Any], version: int) -> list[Trajectory]:
        numbers = [(row, sample) for row in range(PROMPTS) for sample in range(SAMPLES)]
        return [
            rollout(row, sample, self.prompts[row], ids, logprobs, version)
            for (row, sample), (ids, logprobs) in zip(numbers, answers, strict=True)
        ]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that the engine has."""
    return random_model(tmp_path_factory.mktemp("weights") / "engine", "llama")


@pytest.fixture(scope="module")
def answers(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    run = make_run(tmp_path_factory.mktemp("asked"), weights)
    return Answers(run.versions[0], run)


def verdict(run: RecordedRun, scratch: Path) -> tuple[list[str], Diagnosis]:
    scratch.mkdir()
    diagnosis = examine_run(run.run_dir, run.config, run.versions[0], scratch)
    return [finding.name for finding in diagnosis.findings], diagnosis


def test_healthy_runs(weights: Path, answers: Answers, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", weights)
    run.write(1, answers.rollouts(answers.plain, version=0))
    names, diagnosis = verdict(run, tmp_path / "a")
    assert names == []
    assert diagnosis.sides["engine"][0].mean < 1e-5
    colder = make_run(tmp_path / "colder", weights, "generation.temperature=0.6")
    colder.write(1, answers.rollouts(answers.cold, version=0))
    assert verdict(colder, tmp_path / "b")[0] == []
    later = make_run(tmp_path / "later", move_weights(weights, tmp_path / "before", seed=5))
    later.add_version(weights)
    later.write(2, answers.rollouts(answers.plain, version=1))
    assert verdict(later, tmp_path / "c")[0] == []


def test_filters_and_penalties(weights: Path, answers: Answers, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", weights, *(f"generation.{name}={value}" for name, value in OPTIONS.items()))
    run.write(1, answers.rollouts(answers.filtered, version=0))
    names, diagnosis = verdict(run, tmp_path / "a")
    assert names == ["sampling_options"], "vLLM reports what this distribution gives"
    assert diagnosis.sides["engine"][0].mean < 1e-5
    assert "generation.frequency_penalty" in diagnosis.findings[0].key


def test_tensors_and_versions(weights: Path, answers: Answers, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    other_folder = move_weights(weights, tmp_path / "other", seed=6)
    engine_tensor, policy_tensor = (
        load_file(next(folder.glob("*.safetensors")))[name] for folder in (weights, other_folder)
    )
    run = make_run(
        tmp_path / "stale", edited_copy(other_folder, tmp_path / "start", lambda now: now | {name: engine_tensor})
    )
    run.add_version(edited_copy(weights, tmp_path / "next", lambda now: now | {name: policy_tensor}))
    run.write(2, answers.rollouts(answers.plain, version=1))
    names, diagnosis = verdict(run, tmp_path / "a")
    assert names == ["stale_tensor"]
    assert f"kept {name} of version 0" in diagnosis.findings[0].text
    behind = make_run(tmp_path / "behind", weights)
    behind.add_version()
    behind.write(2, answers.rollouts(answers.plain, version=1))
    assert verdict(behind, tmp_path / "b")[0] == ["version_behind"]


def test_gate_and_up(weights: Path, answers: Answers, tmp_path: Path) -> None:
    def swap(now: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {name: name.replace("gate_proj", "up_proj") for name in now if "gate_proj" in name}
        return now | {gate: now[up] for gate, up in names.items()} | {up: now[gate] for gate, up in names.items()}

    run = make_run(tmp_path / "run", edited_copy(weights, tmp_path / "swapped", swap))
    run.write(1, answers.rollouts(answers.plain, version=0))
    assert verdict(run, tmp_path / "a")[0] == ["gate_up_swapped"]


def test_rotary_scaling_temperature_template_and_stop(weights: Path, answers: Answers, tmp_path: Path) -> None:
    run = make_run(tmp_path / "rope", weights, rope_parameters=LINEAR)
    run.write(1, answers.rollouts(answers.plain, version=0))
    assert verdict(run, tmp_path / "a")[0] == ["rope_scaling"]
    colder = make_run(tmp_path / "colder", weights, "generation.temperature=0.6")
    colder.write(1, answers.rollouts(answers.plain, version=0))
    assert verdict(colder, tmp_path / "b")[0] == ["temperature"]
    template = make_run(tmp_path / "template", weights)
    template.write(1, answers.rollouts(answers.of_chatml, version=0))
    assert verdict(template, tmp_path / "c")[0] == ["wrong_template"]
    stop = make_run(tmp_path / "stop", weights)
    stop.write(1, [with_stop(rollout) for rollout in answers.rollouts(answers.plain, version=0)])
    assert verdict(stop, tmp_path / "d")[0] == ["stop_token"]


def with_stop(rollout: Trajectory) -> Trajectory:
    """The rollout with a stop token behind its end, as if it had been sampled."""
    if rollout.stop_reason == "stop":
        return rollout
    ((start, end, version),) = rollout.spans
    ids, logprobs = (
        np.append(rollout.token_ids, EOS).astype(np.int32),
        np.append(rollout.logprobs, 0).astype(np.float32),
    )
    return replace(rollout, token_ids=ids, logprobs=logprobs, spans=[Span(start, end + 1, version)], stop_reason="stop")


@pytest.mark.parametrize("spoil", ["", "routers"], ids=["healthy", "router in bfloat16"])
def test_experts(tmp_path: Path, spoil: str) -> None:
    run = make_run(tmp_path / "run", random_model(tmp_path / "model", "qwen3_moe", **EXPERTS))
    answers = Answers(run.versions[0], run, spoil=spoil)
    run.write(1, answers.rollouts(answers.plain, version=0))
    assert verdict(run, tmp_path / "a")[0] == (["router_precision"] if spoil else [])


def test_bfloat16(weights: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", weights, "policy.precision=bfloat16")
    answers = Answers(run.versions[0], run, dtype="bfloat16")
    run.write(1, answers.rollouts(answers.plain, version=0))
    assert verdict(run, tmp_path / "a")[0] == []


def test_bfloat16_in_a_run_of_float32(weights: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", weights)
    answers = Answers(run.versions[0], run, dtype="bfloat16")
    run.write(1, answers.rollouts(answers.plain, version=0))
    names, diagnosis = verdict(run, tmp_path / "a")
    assert names == ["precision"]
    assert "in the same direction at the same tokens" in diagnosis.findings[0].text


@pytest.mark.parametrize("right", [True, False], ids=["as transformers", "another epsilon"])
def test_an_engine_is_asked_again(weights: Path, answers: Answers, tmp_path: Path, right: bool) -> None:
    options = [] if right else ["generation.engine_args.hf_overrides={rms_norm_eps: 0.05}"]
    run = make_run(tmp_path / "run", weights, *options)
    draw = np.random.default_rng(0)
    rollouts = answers.rollouts(answers.plain, version=0)
    noisy = [
        replace(rollout, logprobs=(rollout.logprobs + draw.normal(0, 0.5, len(rollout.logprobs))).astype(np.float32))
        for rollout in rollouts
    ]
    run.write(1, noisy)
    (tmp_path / "a").mkdir()
    (finding,) = examine_run(run.run_dir, run.config, run.versions[0], tmp_path / "a", engine=True).findings
    assert finding.name == ("other_weights" if right else "first_layer")
    assert right or "computes layers.0.self_attn differently" in finding.text
