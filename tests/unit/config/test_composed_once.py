"""Tests compose a choice of recipe and options once; settings on top of it give what Hydra gives."""

from __future__ import annotations

import pytest
from omegaconf import base

from megatron_grpo.config import compose
from tests.support.composed_once import compose_with_settings, parse_once


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+exp=quickstart", "grpo.max_num_steps=3", "grpo.max_num_steps=4"],
        ["+exp=quickstart", "variant=dapo", "loss_fn.ratio_clip_max=0.3", "grpo.val_period=2"],
        ["+exp=quickstart", "env=math", "env.math.num_workers=3"],
        ["+exp=quickstart", "~env.math", "data.seed=3"],
        ["+exp=ppo", "ppo.seed=3", "policy={model: {path: a}}"],
        ["+exp=quickstart", "policy.generation.vllm_kwargs={a: {b: [1]}}", "run_dir=2026_01"],
        ["+exp=quickstart", "policy=3"],
        ["+exp=quickstart", "policy.model.path.deeper=3"],
        ["+exp=quickstart", "grpo.seed=${nothing}", "grpo.val_period=${grpo.max_num_steps}"],
        ["+exp=quickstart", "grpo.seed=many", "policy.model.path='a"],
        ["job=nowhere.yaml", "+exp=nowhere"],
    ],
    ids=" ".join,
)
def test_settings_give_what_hydra_gives(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # a setting of one command line does not stay for the next
        overrides = overrides if any("run_dir=" in text for text in overrides) else [*overrides, "run_dir=here"]
        typed = compose.compose_typed(overrides)
        with monkeypatch.context() as patched:
            patched.setattr(compose, "compose", compose_with_settings)
            patched.setattr(base, "parse", parse_once)
            compose.compose_typed([*overrides, "grpo.val_batch_size=7"])
            composed = compose.compose_typed(overrides)
        assert (composed.values, composed.problems, composed.config) == (typed.values, typed.problems, typed.config)
