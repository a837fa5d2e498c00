"""Rollout workers and environments are spread over the machines of a cluster: Ray would fill one after the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.generation_schema import RolloutsConfig
from megatron_grpo.environments.environment_processes import EnvironmentHandle
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.rollouts.pool import RolloutPool


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray is asked for, by actor."""
    asked: list[dict[str, Any]] = []

    def remote(**options: Any) -> Callable[[type], Any]:
        call = SimpleNamespace(remote=lambda *_, **__: None)
        made = SimpleNamespace(ready=call, start=call, wait_for_losses=call)
        asked.append(options)
        return lambda _: SimpleNamespace(remote=lambda *_, **__: made)

    monkeypatch.setattr(ray, "remote", remote)
    return asked


def test_workers_and_environments_are_spread(options: list[dict[str, Any]]) -> None:
    EnvironmentHandle("math", EnvironmentConfig(), EnvironmentSettings(), None).spawn()
    config = RolloutsConfig(num_workers=2)
    RolloutPool(config, [], {}, generation_timeout_s=1.0, max_total_sequence_length=8).start()
    assert [one["scheduling_strategy"] for one in options] == ["SPREAD"] * 2
