"""Which engines are not replaced, before any process is touched."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration


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
    generation = VllmGeneration(
        "model",
        GenerationConfig(**settings),
        precision="float32",
        max_total_sequence_length=8,
        actor_options=lambda _: {},
        startup_timeout_s=1.0,
    )
    generation.restarts = [restarts]
    with pytest.raises(RunError) as raised:
        generation.replace({0: "it burns"})
    assert str(raised.value) == message
    assert generation.restarts == [restarts]
