"""The processes of an environment: started by the driver, used and replaced by the rollout workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from megatron_grpo.environments.interface import EnvironmentSettings

if TYPE_CHECKING:
    from megatron_grpo.config.data_schema import EnvironmentConfig

ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


@dataclass(slots=True)
class EnvironmentHandle:
    """Processes of one environment that one rollout worker has for itself. Travels to it, and is light to import."""

    name: str
    """Task name of the environment."""
    timeout_s: float
    """Deadline of one call of a process, in seconds."""
    processes: list[Any]
    """Ray actors (`EnvironmentWorker`), each with the environment in a process of its own."""
    config: bytes = field(repr=False)
    """The environment's configuration and settings, pickled: a rollout worker imports their classes only when it has to
    replace a process."""
    rewards: Any = None
    """Ray reference to the reward functions that are not imported, by their entry in reward_funcs; None: none."""

    def spawn(self) -> Any:
        """Start another process like these; it ends with the process that calls this."""
        from megatron_grpo.environments.worker import EnvironmentWorker

        actor = ray.remote(**ACTOR_OPTIONS)(EnvironmentWorker)
        return actor.remote(self.name, *pickle.loads(self.config), self.rewards)


class EnvironmentPool:
    """All processes of one environment."""

    def __init__(
        self,
        name: str,
        config: EnvironmentConfig,
        settings: EnvironmentSettings,
        rewards: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """
        Args:
            name: task name, for messages.
            config: type, options, processes (num_workers) and deadline of a call.
            settings: settings of the run.
            rewards: functions that are not imported since a script passed them, by their entry in reward_funcs.
        """
        self.name = name
        self.config = config
        self._settings = settings
        self._script_rewards = {entry: one for entry, one in (rewards or {}).items() if entry in config.reward_funcs}
        self._processes: list[Any] = []

    def start(self, shares: int = 1) -> list[EnvironmentHandle]:
        """Begin to start the processes, and divide them: at least one for each of `shares` rollout workers."""
        count = max(self.config.num_workers, shares)
        pickled, rewards = pickle.dumps((self.config, self._settings)), self._rewards()
        handles = [EnvironmentHandle(self.name, self.config.timeout_s, [], pickled, rewards) for _ in range(shares)]
        for number in range(count):
            process = handles[0].spawn()
            self._processes.append(process)
            handles[number % shares].processes.append(process)
        return handles

    def _rewards(self) -> Any:
        """Reference to the reward functions that are not imported; begins to start the reward models among them."""
        rewards: dict[str, Any] = dict(self._script_rewards)
        if self.config.reward_model_folders:
            from megatron_grpo.environments.reward_model import start_reward_model

            for folder in self.config.reward_model_folders:
                rewards[folder], workers = start_reward_model(folder, self.config.reward_model)
                self._processes += workers
        return ray.put(rewards) if rewards else None

    def shutdown(self) -> None:
        """End the processes; idempotent. Processes started by a rollout worker end with that worker."""
        for process in self._processes:
            ray.kill(process)
        self._processes = []


def build_environments(
    config: Mapping[str, EnvironmentConfig],
    settings: EnvironmentSettings | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, EnvironmentPool]:
    """A pool for each entry of the configuration's `env`, by task name; none is started yet.

    Args:
        config: the entries.
        settings: settings of the run; None: the defaults.
        rewards: functions that are not imported since a script passed them, by their entry in reward_funcs.
    """
    shared = settings or EnvironmentSettings()
    return {name: EnvironmentPool(name, environment, shared, rewards) for name, environment in config.items()}
