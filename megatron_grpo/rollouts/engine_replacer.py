"""The driver's replacement of engines that rollout workers report as lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.actor_calls import Arguments, Method, call_actor
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.rollouts.rollout_worker import RolloutWorker

RestoreEngines = Callable[[Mapping[int, str]], None]  # reasons by engine number; SamplingError: it cannot


def refuse_to_restore(lost_engines: Mapping[int, str]) -> None:
    """Raise SamplingError with the reasons, as a `RestoreEngines` that cannot."""
    raise SamplingError("; ".join(dict.fromkeys(lost_engines.values())))


class EngineReplacer:
    """Replaces the engines that rollout workers report as lost.

    `restore` puts the new actors into the mapping `engines`, in place of the lost ones.
    """

    def __init__(self, engines: Mapping[int, Any], restore: RestoreEngines) -> None:
        self._engines, self._restore = engines, restore
        self._announced = dict(engines)  # the actors that workers use, by number
        self._restarts: Counter[int] = Counter()
        self.leaving: set[int] = set()  # numbers of engines that are not replaced: they finish their rollouts
        self._workers: list[Any] = []
        self._reports: dict[Any, Any] = {}  # open calls of `wait_for_losses`, each with its worker

    def watch(self, worker: Any) -> None:
        """Listen to the reports of a worker."""
        self._workers.append(worker)
        self._reports[call_actor(worker, RolloutWorker.wait_for_losses)] = worker

    def announce_replacements(self) -> None:
        """Tell workers about replaced engines, such as those of a refit."""
        for number, actor in self._engines.items():
            announced = self._announced.setdefault(number, actor)
            if actor is not announced:
                self._announced[number] = actor
                self._restarts[number] += 1
                self._tell_workers(RolloutWorker.replace_engine, number, actor)

    def list_used(self) -> dict[int, tuple[Any, int]]:
        """List all engines, each with its replacements so far."""
        self.announce_replacements()
        return {number: (actor, self._restarts[number]) for number, actor in self._engines.items()}

    def hand_back(self, engine: int) -> None:
        """Let others begin an engine's rollouts again."""
        self._tell_workers(RolloutWorker.hand_back, engine)

    def wait_for_call(self, calls: Sequence[Any], timeout_s: float) -> Any | None:
        """Return the next ended call, None after lost engines; raises TimeoutError."""
        # Reports are open calls like any other, so one wait notices both.
        self.announce_replacements()
        ready, _ = ray.wait([*calls, *self._reports], num_returns=1, timeout=max(timeout_s, 0.0))
        if not ready:
            raise TimeoutError
        if ready[0] not in self._reports:
            return ready[0]
        worker, lost_engines = self._reports.pop(ready[0]), {}
        with suppress(RayError):  # if the worker died, its other calls raise the error
            losses = ray.get(ready[0])
            self._reports[call_actor(worker, RolloutWorker.wait_for_losses)] = worker
            # Another worker may have reported the loss, and the engine may be replaced already, or have ended.
            lost_engines = {
                number: loss.reason
                for number, loss in losses.items()
                if number in self._engines and loss.restarts == self._restarts[number]
            }
        for number in lost_engines.keys() & self.leaving:
            del lost_engines[number]
            self.hand_back(number)
        try:
            if lost_engines:
                self._restore(lost_engines)
        except SamplingError as error:
            for number in lost_engines:
                self._tell_workers(RolloutWorker.give_up_engine, number, str(error))
        self.announce_replacements()
        return None

    def _tell_workers(self, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        for worker in self._workers:
            call_actor(worker, method, *args, **kwargs)
