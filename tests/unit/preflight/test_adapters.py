"""What of policy.lora is refused before anything starts, and what is said to change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

from megatron_grpo.config.adapter_targets import MainTarget
from megatron_grpo.config.schema import Config, LoraConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ExpertShape, LatentShape, ModelShape
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.model_checks import find_adapter_problems
from megatron_grpo.preflight.remarks import find_unused_settings
from tests.support.config_problems import SMALL, problems_of
from tests.support.hf_configs import QWEN3_MOE

DENSE = parse_model_shape(SMALL)
EXPERTS = replace(DENSE, experts=ExpertShape(count=4, ffn_hidden=32, top_k=2, layers=(True,) * DENSE.layers))
MIXTURE = parse_model_shape(QWEN3_MOE)
LATENT = replace(DENSE, latent=LatentShape(query_rank=None, rank=16, plain_dim=8, rope_dim=4, value_dim=8))


def config(**lora: object) -> Config:
    config = Config()
    config.policy.lora = LoraConfig(**{"rank": 8, **lora})
    return config


def problems(lora: Config, shape: ModelShape | None = DENSE) -> dict[str, str]:
    return {problem.subject: problem.text for problem in find_adapter_problems(lora, shape)}


def test_adapters_on_a_dense_model_are_taken_and_none_are_never_refused() -> None:
    assert problems(config()) == {}
    assert problems(config(rank=0, target_modules=[]), EXPERTS) == {}
    assert problems(config(), EXPERTS) == {}
    assert problems(config(target_modules=["linear_proj"]), LATENT) == {}


@pytest.mark.parametrize(
    ("targets", "shape", "text"),
    [
        ([], None, "leaves nothing to train; name a layer, or set policy.lora.rank=0"),
        (["linear_qkv", "linear_qkv"], None, "names a layer twice; name each once"),
        (["linear_qkv"], LATENT, "latent attention has no linear_qkv; use [linear_proj]"),
    ],
)
def test_what_cannot_have_adapters_is_named(targets: list[str], shape: ModelShape | None, text: str) -> None:
    subject = f"policy.lora.target_modules=[{','.join(targets)}]"
    assert problems(config(target_modules=targets), shape) == {subject: text}


def test_a_base_model_that_would_have_to_move_is_refused() -> None:
    moving = config()
    moving.grpo.sync_ref_model = True
    (text,) = problems(moving).values()
    assert text.endswith("use false, or train all weights with policy.lora.rank=0")


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("[q_proj,k_proj,v_proj]", ["linear_qkv"]),
        ("[down_proj,v_proj,o_proj,q_proj,k_proj]", ["linear_fc2", "linear_qkv", "linear_proj"]),
        ("[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]", list(get_args(MainTarget))),
        ("all-linear", list(get_args(MainTarget))),
        ("[all-linear]", list(get_args(MainTarget))),
        ("[qkv_proj,gate_up_proj]", ["linear_qkv", "linear_fc1"]),
        ("[linear_proj,down_proj]", ["linear_proj", "linear_fc2"]),
    ],
)
def test_names_of_peft_are_taken(targets: str, layers: list[str]) -> None:
    overrides = ["+exp=quickstart", "policy.lora.rank=8", f"policy.lora.target_modules={targets}"]
    assert compose_config(overrides).policy.lora.target_modules == layers


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config, MistralConfig, Gemma3TextConfig])
def test_every_linear_layer_that_peft_finds_has_a_name_here(config_class: type) -> None:
    settings = config_class(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    adapted = get_peft_model(model, PeftConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if ".lora_A." in name}
    overrides = ["+exp=quickstart", f"policy.lora.target_modules=[{','.join(sorted(names))}]", "policy.lora.rank=2"]
    assert {*compose_config(overrides).policy.lora.target_modules} == {*get_args(MainTarget)}


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ("[query]", "must be list of one of linear_qkv, linear_proj, linear_fc1, linear_fc2, in_proj, out_proj, or"),
        ("[q_proj,v_proj]", "has q_proj and v_proj alone; name k_proj too, or linear_qkv: these matrices share one"),
        ("[o_proj,up_proj]", "has up_proj alone; name gate_proj too, or linear_fc1"),
        (".*proj", "must be list of"),
    ],
)
def test_layers_that_cannot_be_told_apart_or_are_unknown_are_refused(targets: str, text: str) -> None:
    problems = problems_of([f"policy.lora.target_modules={targets}", "policy.lora.rank=8"])
    assert [subject for subject in problems if subject.startswith("policy.lora.target_modules")]
    assert text in str(problems)


def test_settings_of_adapters_without_adapters_change_nothing() -> None:
    remarks = {problem.subject: problem.text for problem in find_unused_settings(config(rank=0, alpha=3.0))}
    assert remarks == {"policy.lora.alpha=3.0": "needs policy.lora.rank above 0"}


def test_the_value_model_of_ppo_is_trained_whole() -> None:
    settings = replace(config(), algorithm="ppo")
    assert settings.value_model is not None
    assert settings.value_model.lora.rank == 0


def alone(gpus: int = 0, **lora: object) -> Config:
    settings = config(**lora)
    settings.refit.adapters = "alone"
    settings.cluster.gpus_per_node = gpus
    return settings


def test_adapters_alone_need_slots_that_can_hold_them() -> None:
    assert problems(alone()) == {}
    assert problems(alone(gpus=8), MIXTURE) == {}
    assert problems(alone(target_modules=["linear_proj"]), MIXTURE) == {}
    (text,) = problems(alone(), MIXTURE).values()
    assert text.startswith("vLLM's CPU build has no adapters of experts; use merged, or leave linear_fc1")
    (text,) = problems(alone(rank=600)).values()
    assert text == "needs slots of vLLM's, which take policy.lora.rank up to 512; use merged, or a lower rank"
    served, rounded = alone(), alone()
    served.generation.server.urls = ["http://10.0.0.1:8000"]
    rounded.refit.fp8_blocks = True
    for settings, word in ((served, "engines of the run's own"), (rounded, "sends no weights")):
        (text,) = problems(settings).values()
        assert word in text
