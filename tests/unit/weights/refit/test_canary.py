"""When the checks after a refit are due, what prompt and limits they have, and what a failed one does to the refit."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_grpo.config.errors import CanaryError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.sampler.canary import CanaryPrompt
from megatron_grpo.weights.refit.canary import Canary, canary_tokens, limit_of


def test_the_mean_difference_decides() -> None:
    prompt = CanaryPrompt(3, (5, 6, 7), expected=(-1.0, -2.0), limit=0.1)
    assert prompt.require([-1.0, -2.1]) == pytest.approx(0.05)
    with pytest.raises(CanaryError, match=r"with version 3 of the weights .* differ from the policy's by 0.2 on"):
        prompt.require([-1.0, -2.4])
    with pytest.raises(CanaryError, match="by nan on average"):
        prompt.require([math.nan, -2.0])


def test_the_prompt_follows_from_the_seed_and_fits_the_model() -> None:
    assert canary_tokens(1, 1000, 2048) == canary_tokens(1, 1000, 2048) != canary_tokens(2, 1000, 2048)
    tokens = canary_tokens(1, 7, 20)
    assert len(tokens) == 19, "one token is sampled"
    assert set(tokens) <= set(range(7))


def test_the_canary_keeps_to_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    canary = Canary(RefitConfig(canary_share=0.01), (1, 2))
    followed = []
    for step in range(1000):
        now[0] += 0.5
        if canary.is_due():
            followed.append(step)
            canary.took(0.02)
    assert followed[0] == 0, "the first refit"
    assert len(followed) == pytest.approx(1000 * 0.5 * 0.01 / 0.02, abs=1)
    always = Canary(RefitConfig(canary_share=1.0), (1, 2))
    always.took(1e6)
    assert always.is_due()
    assert not Canary(RefitConfig(canary=False), (1, 2)).is_due()


def test_weights_are_compared_at_first_and_at_a_period() -> None:
    canary = Canary(RefitConfig(weight_check_period=5), (1, 2))
    assert [version for version in range(12) if canary.compares_weights(version, new=version == 3)] == [0, 3, 5, 10]
    assert not Canary(RefitConfig(weight_check_period=None), (1, 2)).compares_weights(0, new=True)


def test_the_limit_is_that_of_the_coarser_side() -> None:
    config = Config()
    exact: Any = replace(config, policy=replace(config.policy, precision="float32"))
    assert limit_of(exact) < limit_of(config)
    engine = replace(config.generation.engine, dtype="bfloat16")
    assert limit_of(replace(exact, generation=replace(config.generation, engine=engine))) == limit_of(config)
    quantised = replace(config.generation, engine_args={"quantization": "fp8_per_block"})
    assert limit_of(replace(config, generation=quantised)) > limit_of(config)
