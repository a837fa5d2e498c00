"""Processes of an environment, which rollout workers use and replace."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import EnvironmentSettings, EnvironmentStatus
from megatron_grpo.environments.reward_model import start_reward_model


def kill_process(actor: Any, status: EnvironmentStatus) -> None:
    """End a process (`EnvironmentWorker`) at once, even if it hangs."""
    ray.kill(actor)
    if status.node_id == ray.get_runtime_context().get_node_id():
        with suppress(ProcessLookupError):
            os.kill(status.pid, signal.SIGKILL)  # a stopped process does not react to Ray


@dataclass(slots=True)
class EnvironmentHandle:
    """One rollout worker's share of an environment's processes."""

    name: str  # task name of the environment
    config: EnvironmentConfig
    settings: EnvironmentSettings
    rewards: ray.ObjectRef | None  # functions and clients of reward models, by their entry in reward_funcs
    actors: list[Any] = field(default_factory=list)  # `EnvironmentWorker`s, each with a copy of the environment

    def spawn(self) -> Any:
        """Start another process, which ends with the calling process."""
        actor: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(EnvironmentWorker)
        return actor.remote(self.name, self.config, self.settings, self.rewards)


@dataclass(slots=True)
class EnvironmentPool:
    """All processes of one environment, held by the driver."""

    name: str  # task name of the environment
    config: EnvironmentConfig
    settings: EnvironmentSettings
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # of a script, by entry in reward_funcs
    _actors: list[Any] = field(default_factory=list, init=False)

    def start(self, shares: int = 1) -> list[EnvironmentHandle]:
        """Start processes for `shares` rollout workers, without waiting for them."""
        names = self.config.reward_funcs
        rewards: dict[str, Any] = {name: self.rewards[name] for name in names if name in self.rewards}
        for folder in self.config.reward_model_folders:
            rewards[folder], workers = start_reward_model(folder, self.config.reward_model)
            self._actors += workers
        stored_rewards = ray.put(rewards) if rewards else None  # once for all processes

        handles = [EnvironmentHandle(self.name, self.config, self.settings, stored_rewards) for _ in range(shares)]
        for index in range(max(self.config.num_workers, shares)):
            actor = handles[0].spawn()
            self._actors.append(actor)
            handles[index % shares].actors.append(actor)
        return handles

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

    `settings` maps a task name to the settings of its environment; `rewards` are functions that a script passed.
    """
    rewards = rewards or {}
    return {name: EnvironmentPool(name, section, settings(name), rewards) for name, section in config.items()}
