"""The processes of an environment: started by the driver, used and replaced by the rollout workers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from megatron_grpo.environments.settings import EnvironmentSettings

if TYPE_CHECKING:
    from megatron_grpo.config.data_schema import EnvironmentConfig

ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 0}


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
    """The environment's configuration and settings, pickled: a worker that replaces no process need not import their
    classes."""

    def spawn(self) -> Any:
        """Another process like these; it belongs to the process that calls this."""
        from megatron_grpo.environments.worker import EnvironmentWorker

        actor = ray.remote(**ACTOR_OPTIONS)(EnvironmentWorker)
        return actor.remote(self.name, *pickle.loads(self.config))


class EnvironmentPool:
    """All processes of one environment."""

    def __init__(self, name: str, config: EnvironmentConfig, settings: EnvironmentSettings) -> None:
        """
        Args:
            name: task name, for messages.
            config: type, options, processes (num_workers) and deadline of a call.
            settings: what the environment may know of the run.
        """
        self.name = name
        self.config = config
        self._settings = settings
        self._processes: list[Any] = []

    def start(self, shares: int = 1) -> list[EnvironmentHandle]:
        """Start the processes, in the background, and share them out: at least one to each of `shares` users."""
        count = max(self.config.num_workers, shares)
        pickled = pickle.dumps((self.config, self._settings))
        handles = [EnvironmentHandle(self.name, self.config.timeout_s, [], pickled) for _ in range(shares)]
        for number in range(count):
            process = handles[0].spawn()
            self._processes.append(process)
            handles[number % shares].processes.append(process)
        return handles

    def shutdown(self) -> None:
        """End the processes; idempotent. Those that a rollout worker started itself end with it."""
        for process in self._processes:
            ray.kill(process)
        self._processes = []


def build_environments(
    config: Mapping[str, EnvironmentConfig], settings: EnvironmentSettings | None = None
) -> dict[str, EnvironmentPool]:
    """A pool for each entry of the configuration's `env`, by task name; none is started yet.

    Args:
        config: the entries.
        settings: what environments may know of the run; None: the defaults.
    """
    shared = settings or EnvironmentSettings()
    return {name: EnvironmentPool(name, environment, shared) for name, environment in config.items()}
