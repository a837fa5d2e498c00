"""How many threads a rank computes with on a CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig
from megatron_grpo.trainer import model_ranks
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy


@pytest.mark.parametrize(
    ("cores", "ranks", "on_machine", "shared", "asked", "expected"),
    [
        (8, 2, None, False, None, 4),
        (8, 2, None, True, None, 2),
        (2, 1, None, True, None, 1),
        (2, 2, None, True, None, 1),
        (8, 2, None, True, 3, 3),
        (96, 128, 8, False, None, 12),
        (96, 2, 8, False, None, 48),
    ],
)
def test_ranks_share_the_cores_of_their_machine_with_engines_that_sample_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    ranks: int,
    on_machine: int | None,
    shared: bool,
    asked: int | None,
    expected: int,
) -> None:
    threads: list[int] = []

    class Actor:
        @classmethod
        def options(cls, **_: Any) -> type[Actor]:
            return cls

        @classmethod
        def remote(cls, _name: str, _rank: int, count: int) -> None:
            threads.append(count)

    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(model_ranks.ray, "remote", lambda _: Actor)
    shape: Any = None
    settings = RankSettings(
        config=PolicyConfig(model=ModelConfig(path="none"), parallel=ParallelConfig(data=ranks), threads=asked),
        shape=shape,
        folder="none",
        decay_steps=1,
        ranks_per_machine=on_machine,
        shares_cores=shared,
    )
    MegatronPolicy(settings, lambda _: {}, startup_timeout_s=1.0)
    assert threads == [expected] * ranks


@pytest.mark.parametrize(("enabled", "age", "ahead"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_without_age_nothing_is_sampled_meanwhile(enabled: bool, age: int, ahead: bool) -> None:
    assert AsyncGRPOConfig(enabled=enabled, max_trajectory_age_steps=age).can_sample_ahead == ahead
