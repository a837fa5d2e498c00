"""What vLLM needs for models with delta nets on a CPU."""

from __future__ import annotations

import pytest

from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight import engine_checks
from megatron_grpo.preflight.load import compose_config
from tests.support.engine_configs import ENGINE_CONFIGS


def problems(*overrides: str, **sizes: object) -> dict[str, str]:
    """Of the engines of the recipe whose model has other sizes."""
    config = compose_config(["+exp=quickstart_hybrid", "policy.model.path=m", *overrides])
    shape = parse_model_shape({**PREPARED_MODELS["addition_hybrid"], **sizes})
    return {problem.subject: problem.text for problem in engine_checks.find_engine_problems(config, shape)}


@pytest.fixture
def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "find_spec", lambda name: None if name == "torchvision" else object())


@pytest.mark.usefixtures("without_torchvision")
def test_a_missing_torchvision_is_named_with_what_installs_it() -> None:
    ((subject, text),) = problems().items()
    assert subject == "policy.model.path=m"
    assert "is a qwen3_5 model, whose module in vLLM imports torchvision" in text
    assert "run requirements/install_cpu.sh .venv" in text
    assert problems("debug.rollouts_from=recorded", "data.val_path=null") == {}, "no engines"
    assert problems("cluster.gpus_per_node=8") == {}, "vLLM's CUDA build installs it"
    config = compose_config(["+exp=quickstart_hybrid", "policy.model.path=m"])
    rules = engine_checks.find_engine_problems(config, parse_model_shape(ENGINE_CONFIGS["ministral3_vision"]))
    text = "is a model that sees images, whose module in vLLM imports torchvision"
    assert any(text in problem.text for problem in rules)


def test_only_delta_heads_of_128_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "find_spec", lambda name: object())
    assert problems() == {}
    ((subject, text),) = problems("generation.engine.dtype=float32").items()
    assert subject == "generation.engine.dtype=float32"
    assert text.endswith("use generation.engine.dtype=bfloat16")
    (text,) = problems(linear_value_head_dim=64).values()
    assert text.startswith("has delta nets with heads of 128 and 64 ")
