"""Processes of an environment, which rollout workers use and replace."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from megatron_grpo.environments.environment_status import EnvironmentStatus
from megatron_grpo.environments.interface import EnvironmentSettings

if TYPE_CHECKING:
    from megatron_grpo.config.data_schema import EnvironmentConfig


@dataclass(frozen=True, slots=True)
class EnvironmentProcess:
    """A ready process of an environment."""

    actor: Any  # Ray actor (`EnvironmentWorker`)
    status: EnvironmentStatus

    def kill(self) -> None:
        """End the process at once, even if it hangs."""
        ray.kill(self.actor)
        if self.status.node_id == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError):
                os.kill(self.status.pid, signal.SIGKILL)  # a stopped process does not react to Ray


@dataclass(slots=True)
class EnvironmentHandle:
    """One rollout worker's share of an environment's processes."""

    name: str  # task name of the environment
    config: EnvironmentConfig
    settings: EnvironmentSettings
    rewards: ray.ObjectRef | None
    """Reward functions and clients of reward models, by their entry in reward_funcs."""
    actors: list[Any] = field(default_factory=list)
    """Ray actors (`EnvironmentWorker`), each with its own copy of the environment."""

    def spawn(self) -> Any:
        """Start another process, which ends with the calling process."""
        from megatron_grpo.environments.environment_worker import EnvironmentWorker

        actor: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(EnvironmentWorker)
        return actor.remote(self.name, self.config, self.settings, self.rewards)


@dataclass(slots=True)
class EnvironmentPool:
    """All processes of one environment, held by the driver."""

    name: str  # task name of the environment
    config: EnvironmentConfig
    settings: EnvironmentSettings
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that a script passed, by their entry in reward_funcs; they are not imported."""
    _actors: list[Any] = field(default_factory=list, init=False)

    def start(self, shares: int = 1) -> list[EnvironmentHandle]:
        """Begin to start processes for `shares` rollout workers, at least one each."""
        rewards = self._store_rewards()
        handles = [EnvironmentHandle(self.name, self.config, self.settings, rewards) for _ in range(shares)]
        for index in range(max(self.config.num_workers, shares)):
            actor = handles[0].spawn()
            self._actors.append(actor)
            handles[index % shares].actors.append(actor)
        return handles

    def _store_rewards(self) -> ray.ObjectRef | None:
        """Store a script's reward functions and started reward models."""
        rewards: dict[str, Any] = {
            name: function for name, function in self.rewards.items() if name in self.config.reward_funcs
        }
        if self.config.reward_model_folders:
            from megatron_grpo.environments.reward_model import start_reward_model

            for folder in self.config.reward_model_folders:
                rewards[folder], workers = start_reward_model(folder, self.config.reward_model)
                self._actors += workers
        return ray.put(rewards) if rewards else None

    def shutdown(self) -> None:
        """End the processes; idempotent."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


def build_environments(
    config: Mapping[str, EnvironmentConfig],
    settings: Callable[[str], EnvironmentSettings] = lambda _: EnvironmentSettings(),
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, EnvironmentPool]:
    """Make a pool for each environment of the configuration; starts nothing.

    Args:
        config: the section `env`, by task name.
        settings: maps a task name to the settings of its environment.
        rewards: reward functions that a script passed, by their entry in reward_funcs.
    """
    return {
        name: EnvironmentPool(name, environment, settings(name), rewards or {}) for name, environment in config.items()
    }
