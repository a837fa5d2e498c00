"""What of policy.quantization is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_grpo.config.schema import Config, Fp8Config, LoraConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ExpertShape, ModelShape
from megatron_grpo.preflight.machine_checks import find_package_problems
from megatron_grpo.preflight.model_checks import (
    find_quantization_problems,
    find_training_problems,
)
from tests.support.config_problems import SMALL

SHAPE = parse_model_shape(SMALL)


def config(**policy: object) -> Config:
    config = Config()
    for name, value in {"quantization": "int8", **policy}.items():
        setattr(config.policy, name, value)
    return config


def problems(config: Config, shape: ModelShape | None = SHAPE) -> dict[str, str]:
    return {problem.subject: problem.text for problem in find_quantization_problems(config, shape)}


@pytest.mark.parametrize("quantization", ["int8", "fp8", None])
def test_what_fits_is_taken(quantization: str | None) -> None:
    assert problems(config(quantization=quantization)) == {}


def test_what_acts_on_the_same_weights_is_refused_with_what_to_do() -> None:
    subject = "policy.quantization=int8"
    fp8 = problems(config(fp8=Fp8Config(format="hybrid", simulate=True)))
    assert fp8[subject].endswith("use null, or policy.fp8.format=off")
    assert problems(config(lora=LoraConfig(rank=4)))[subject].endswith("use null, or policy.lora.rank=0")
    fused = [problem.text for problem in find_training_problems(config(gradient_accumulation_fusion=True), SHAPE)]
    assert any(text.startswith(f"with {subject}: ") and text.endswith("use null") for text in fused)
    off = config(quantization=None, lora=LoraConfig(rank=4), gradient_accumulation_fusion=True)
    assert problems(off) == {}


def test_experts_are_refused() -> None:
    experts = ExpertShape(count=4, ffn_hidden=32, top_k=2, layers=(True,) * 4)
    (text,) = problems(config(), replace(SHAPE, experts=experts)).values()
    assert text == "is not supported for a mixture of experts; use null"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = find_package_problems(config(quantization="fp8"))
    assert problem.subject == "policy.quantization=fp8"
    assert "pip install nvidia-modelopt" in problem.text
    assert list(find_package_problems(config(quantization=None))) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert list(find_package_problems(config())) == []


def test_the_value_model_is_not_quantised() -> None:
    settings = replace(config(), algorithm="ppo")
    assert settings.value_model is not None
    assert settings.value_model.quantization is None
