"""Which engines are not replaced, and what a failure of one means for others, before any process is touched."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration


def not_started(config: GenerationConfig) -> VllmGeneration:
    return VllmGeneration(
        VllmSettings(
            model_path="model",
            config=config,
            precision="float32",
            max_total_sequence_length=8,
        ),
        actor_options=lambda _: {},
        startup_timeout_s=1.0,
    )


@pytest.mark.parametrize(
    ("settings", "restarts", "message"),
    [
        ({"engine_restarts": 0}, 0, "it burns"),
        (
            {"engine_restarts": 3},
            3,
            "it burns; it was replaced as often as generation.engine_restarts=3 allows",
        ),
        ({"placement": "colocated"}, 0, "it burns; engines are not replaced with generation.placement=colocated"),
        ({"placement": "colocated", "engine_restarts": 0}, 0, "it burns"),
    ],
)
def test_an_engine_that_is_not_replaced_says_why(settings: dict[str, Any], restarts: int, message: str) -> None:
    generation = not_started(GenerationConfig(**settings))
    generation.restarts = [restarts]
    with pytest.raises(RunError) as raised:
        generation.replace({0: "it burns"})
    assert str(raised.value) == message
    assert generation.restarts == [restarts]


def test_engines_beside_one_that_fails_are_asleep_before_others_have_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep: list[int] = []

    def fails(calls: list[int], **_: Any) -> None:
        raise RunError("engine 0 is lost")

    def wait(calls: list[int], *, num_returns: int, timeout: float) -> None:
        assert num_returns == len(calls)
        asleep.extend(calls)

    generation = not_started(GenerationConfig())
    monkeypatch.setattr(generation, "submit", lambda method: [0, 1, 2])
    monkeypatch.setattr("megatron_grpo.generation.vllm_generation.gather", fails)
    monkeypatch.setattr("megatron_grpo.generation.vllm_generation.ray.wait", wait)
    with pytest.raises(RunError, match="engine 0 is lost"):
        generation.sleep()
    assert asleep == [0, 1, 2]
