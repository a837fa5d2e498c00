"""The driver's handle of the vLLM engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray

from megatron_grpo.cluster.actor_calls import Arguments, Method, call_actor
from megatron_grpo.cluster.actor_processes import compute_restart_timeout, end_on_machines
from megatron_grpo.cluster.futures import gather
from megatron_grpo.cluster.process_log import ENGINE_NAME
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.generation_schema import EngineMemory
from megatron_grpo.generation.engine import VllmEngine
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.engine_interface import Engine, EngineStart
from megatron_grpo.generation.server import ServerEngine

SLEEP_S = 60.0  # for the other engines to go to sleep when one has failed to
SHUTDOWN_S = 10.0

logger = logging.getLogger(__name__)


class VllmGeneration:
    """The run's engines or external servers, each with a Ray actor."""

    def __init__(
        self, settings: VllmSettings, *, actor_options: Callable[[int], dict[str, Any]], startup_timeout_s: float
    ) -> None:
        # `actor_options`: Ray options (resources, placement) of the engine with an index.
        self.routed, self.config = settings.routed, settings.config
        self._settings = [replace(settings, index=index) for index in range(self.config.parallel.data)]
        self._actor_options = actor_options
        self._startup_timeout_s = startup_timeout_s
        self._started_at = 0.0
        self.engines: list[Any] = []  # Ray actors (`Engine`), in the order of their index
        self._starting: list[ray.ObjectRef] = []
        self.starts: list[EngineStart] = []  # of the engines in use
        self.startup_s: list[dict[str, float]] = []  # of the first engines, by part
        self.restarts = [0] * self.config.parallel.data

    def start(self) -> None:
        """Begin to start the engines, so that the policy can start meanwhile."""
        self._started_at = time.monotonic()
        self.engines = [self._make_actor(settings) for settings in self._settings]
        self._starting = self.submit(Engine.start)

    def wait_ready(self) -> None:
        """Wait until every engine can generate; RunError otherwise."""
        deadline_s = max(self._startup_timeout_s - (time.monotonic() - self._started_at), 0.0)
        self.starts = gather(self._starting, deadline_s=deadline_s, phase_name="generation start", name=ENGINE_NAME)
        self.startup_s = [start.seconds for start in self.starts]

    def replace(self, lost_engines: Mapping[int, str]) -> None:
        """Replace engines, with reasons by number; a refit must follow.

        Raises RunError if an engine was already replaced generation.engine_restarts times or does not start, or if
        engines share devices with models, which would have to be offloaded first.
        """
        limit = self.config.engine_restarts
        # All are checked before one is touched.
        for index, reason in lost_engines.items():
            if limit and self.config.is_colocated:
                raise RunError(f"{reason}; engines are not replaced with generation.placement=colocated")
            if self.restarts[index] >= limit:
                again = f"; it was replaced as often as generation.engine_restarts={limit} allows" if limit else ""
                raise RunError(reason + again)
        for index, reason in lost_engines.items():
            logger.warning("%s is replaced: %s", ENGINE_NAME(index), reason)
            ray.kill(self.engines[index])
            end_on_machines({ENGINE_NAME(index): self.starts[index].processes})
            self.restarts[index] += 1
            self.engines[index] = self._make_actor(self._settings[index])
        calls = self.submit_to(lost_engines, Engine.start)
        names = [*map(ENGINE_NAME, calls)]
        starts = gather(
            [*calls.values()],
            deadline_s=self.restart_timeout_s,
            phase_name="generation restart",
            name=names.__getitem__,
        )
        for index, start in zip(calls, starts, strict=True):
            self.starts[index] = start

    @property
    def restart_timeout_s(self) -> float:
        """Seconds that a new engine may take to start."""
        return compute_restart_timeout(self._startup_timeout_s, [start.seconds for start in self.starts])

    def submit(
        self, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> list[ray.ObjectRef]:
        return list(self.submit_to(range(len(self.engines)), method, *args, **kwargs).values())

    def submit_to(
        self, numbers: Iterable[int], method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> dict[int, ray.ObjectRef]:
        return {number: call_actor(self.engines[number], method, *args, **kwargs) for number in numbers}

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Put all engines to sleep; RunError if one does not."""
        calls = self.submit(VllmEngine.sleep, keep_weights)
        try:
            self._gather(calls, "engines going to sleep")
        except RunError:
            ray.wait(calls, num_returns=len(calls), timeout=SLEEP_S)  # the models return to the devices in any case
            raise

    def wake(self, part: EngineMemory) -> None:
        """Let engines take back memory: first weights, then cache."""
        self._gather(self.submit(VllmEngine.wake, part), "engines waking up")

    def shutdown(self) -> None:
        """End every engine process; idempotent."""
        engines, self.engines = self.engines, []
        calls = [call_actor(engine, Engine.shutdown) for engine in engines]
        ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_S)
        for engine in engines:
            ray.kill(engine)

    def _gather(self, refs: list[ray.ObjectRef], phase_name: str) -> None:
        gather(refs, deadline_s=self.config.timeout_s, phase_name=phase_name, name=ENGINE_NAME)

    def _make_actor(self, settings: VllmSettings) -> Any:
        engine_class = ServerEngine if settings.config.server.urls else VllmEngine
        return ray.remote(engine_class).options(**self._actor_options(settings.index)).remote(settings)
