"""The driver's handle of the vLLM engines."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.actor_calls import Arguments, Method, call_actor
from megatron_grpo.cluster.actor_processes import compute_restart_timeout, end_on_machines
from megatron_grpo.cluster.futures import explain_error, gather
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


class AddedEngine(NamedTuple):
    """An engine that starts while the run goes on."""

    actor: Any
    start: ray.ObjectRef  # its call of `Engine.start`
    since: float  # time (monotonic) of this call


class VllmGeneration:
    """The run's engines or external servers, each with a Ray actor."""

    def __init__(
        self, settings: VllmSettings, *, actor_options: Callable[[int], dict[str, Any]], startup_timeout_s: float
    ) -> None:
        # `actor_options`: Ray options (resources, placement) of the engine with a number.
        self.routed, self.config = settings.routed, settings.config
        self._settings = settings
        self._actor_options = actor_options
        self._startup_timeout_s = startup_timeout_s
        self._started_at = 0.0
        self.engines: dict[int, Any] = {}  # Ray actors (`Engine`), by number
        self._starting: list[ray.ObjectRef] = []
        self.starts: dict[int, EngineStart] = {}  # of the engines in use
        self.startup_s: list[dict[str, float]] = []  # of the first engines, by part
        self.restarts: Counter[int] = Counter()
        self.next_number = self.config.parallel.data  # of the next engine that is added; none comes again
        self.added: dict[int, AddedEngine] = {}  # engines that have not started yet

    def start(self) -> None:
        """Begin to start the engines, so that the policy can start meanwhile."""
        self._started_at = time.monotonic()
        self.engines |= {number: self._make_actor(number) for number in range(self.config.parallel.data)}
        self._starting = self.submit(Engine.start)

    def wait_ready(self) -> None:
        """Wait until every engine can generate; RunError otherwise."""
        deadline_s = max(self._startup_timeout_s - (time.monotonic() - self._started_at), 0.0)
        starts = gather(self._starting, deadline_s=deadline_s, phase_name="generation start", name=ENGINE_NAME)
        self.starts |= zip(self.engines, starts, strict=True)
        self.startup_s = [start.seconds for start in starts]

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
            self.engines[index] = self._make_actor(index)
        calls = self.submit_to(lost_engines, Engine.start)
        names = [*map(ENGINE_NAME, calls)]
        starts = gather(
            [*calls.values()],
            deadline_s=self.restart_timeout_s,
            phase_name="generation restart",
            name=names.__getitem__,
        )
        self.starts |= zip(calls, starts, strict=True)

    def begin_add(self) -> int:
        """Begin to start engine `next_number`; return this number."""
        number, self.next_number = self.next_number, self.next_number + 1
        actor = self._make_actor(number)
        self.added[number] = AddedEngine(actor, call_actor(actor, Engine.start), time.monotonic())
        return number

    def take_added(self) -> Iterator[tuple[int, str | None]]:
        """Take over started engines; a refit must follow.

        Yields the number of each, and that of each one that did not start, which is ended, with the reason.
        """
        for number, added in [*self.added.items()]:
            reason: str | None = None
            if ray.wait([added.start], num_returns=1, timeout=0)[0]:
                try:
                    self.starts[number] = ray.get(added.start)
                    self.engines[number] = added.actor
                except RayError as error:
                    reason = f"it {explain_error(error)}"
            elif time.monotonic() - added.since > self._startup_timeout_s:
                reason = f"it did not start within cluster.startup_timeout_s={self._startup_timeout_s:g}"
            else:
                continue
            del self.added[number]
            if reason is not None:
                ray.kill(added.actor)
            yield number, reason

    def remove(self, number: int) -> None:
        """End an engine that nobody uses any more."""
        self._end([self.engines.pop(number)])
        end_on_machines({ENGINE_NAME(number): self.starts.pop(number).processes})

    @property
    def restart_timeout_s(self) -> float:
        """Seconds that a new engine may take to start."""
        return compute_restart_timeout(self._startup_timeout_s, [start.seconds for start in self.starts.values()])

    def submit(
        self, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> list[ray.ObjectRef]:
        return list(self.submit_to(self.engines, method, *args, **kwargs).values())

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
        engines, self.engines = self.engines, {}
        self._end([*engines.values(), *(added.actor for added in self.added.values())])
        self.added = {}

    def _end(self, engines: Sequence[Any]) -> None:
        calls = [call_actor(engine, Engine.shutdown) for engine in engines]
        ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_S)
        for engine in engines:
            ray.kill(engine)

    def _gather(self, refs: list[ray.ObjectRef], phase_name: str) -> None:
        gather(refs, deadline_s=self.config.timeout_s, phase_name=phase_name, name=ENGINE_NAME)

    def _make_actor(self, number: int) -> Any:
        engine_class = ServerEngine if self.config.server.urls else VllmEngine
        settings = replace(self._settings, index=number)
        return ray.remote(engine_class).options(**self._actor_options(number)).remote(settings)
