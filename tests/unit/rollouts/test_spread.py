"""Rollout workers and environments are spread over the machines of a cluster: Ray would fill one after the other."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.generation_schema import RolloutsConfig
from megatron_grpo.environments.environment_processes import EnvironmentHandle
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.rollouts import pool as rollout_pool
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.rollout_worker import RolloutWorker


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray is asked for, by actor."""
    actor_options: list[dict[str, Any]] = []

    def remote(**options: Any) -> Callable[[type], Any]:
        call = SimpleNamespace(remote=lambda *_, **__: None)
        worker = SimpleNamespace(ready=call, start=call, wait_for_losses=call)
        actor_options.append(options)
        return lambda _: SimpleNamespace(remote=lambda *_, **__: worker)

    monkeypatch.setattr(ray, "remote", remote)
    return actor_options


def test_workers_and_environments_are_spread(options: list[dict[str, Any]]) -> None:
    EnvironmentHandle("math", EnvironmentConfig(), EnvironmentSettings(), None).spawn()
    config = RolloutsConfig(num_workers=2)
    RolloutPool(config, {}, {}, generation_timeout_s=1.0, max_total_sequence_length=8).start()
    assert [option["scheduling_strategy"] for option in options] == ["SPREAD"] * 2


@pytest.mark.parametrize("workers", range(1, 26))
def test_every_prompt_goes_to_one_worker(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the workers' shares add up to less than 1, as 0.1 ten times does."""
    begun: list[tuple[int, int]] = []

    def stream(actor: int, method: object, batch: int, settings: object, part: list[tuple[int, object]]) -> object:
        assert method is RolloutWorker.collect
        begun.extend((number, actor) for number, _ in part)
        return object()

    monkeypatch.setattr(rollout_pool, "stream_actor", stream)
    monkeypatch.setattr(rollout_pool, "call_actor", lambda *_: object())
    pool = RolloutPool(RolloutsConfig(), {}, {}, generation_timeout_s=1.0, max_total_sequence_length=8)
    pool.actors, pool._shares = list(range(workers)), [1 / workers] * workers
    prompts: Any = dict.fromkeys(range(100))
    pool.begin(prompts, None)  # type: ignore[arg-type]
    assert [number for number, _ in begun] == list(range(100))
    counts = [sum(actor == worker for _, actor in begun) for worker in range(workers)]
    assert max(counts) - min(counts) <= 1
