"""The driver's replacement of engines that rollout workers report as lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.actor_calls import call_actor
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.rollouts.rollout_worker import RolloutWorker

RestoreEngines = Callable[[Mapping[int, str]], None]  # reasons by engine number; SamplingError: it cannot


def refuse_to_restore(lost_engines: Mapping[int, str]) -> None:
    """Raise SamplingError with the reasons, as a `RestoreEngines` that cannot."""
    raise SamplingError("; ".join(dict.fromkeys(lost_engines.values())))


class EngineReplacer:
    """Replaces the engines that rollout workers report as lost.

    `restore` puts the new actors into the list `engines`, in place of the lost ones.
    """

    def __init__(self, engines: Sequence[Any], restore: RestoreEngines) -> None:
        self._engines, self._restore = engines, restore
        self._announced = list(engines)  # the actors that workers use
        self._restarts = [0] * len(engines)
        self._workers: list[tuple[Any, Sequence[int]]] = []  # each with the numbers of its engines
        self._reports: dict[Any, Any] = {}  # open calls of `wait_for_losses`, each with its worker

    def watch(self, worker: Any, numbers: Sequence[int]) -> None:
        """Listen to the reports of a worker that uses these engines."""
        self._workers.append((worker, numbers))
        self._reports[call_actor(worker, RolloutWorker.wait_for_losses)] = worker

    def announce_replacements(self) -> None:
        """Tell workers about replaced engines, such as those of a refit."""
        for number, actor in enumerate(self._engines):
            if actor is not self._announced[number]:
                self._announced[number] = actor
                self._restarts[number] += 1
                for worker in self._list_workers(number):
                    call_actor(worker, RolloutWorker.replace_engine, number, actor)

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
            # Another worker may have reported the loss, and the engine may be replaced already.
            lost_engines = {
                number: loss.reason for number, loss in losses.items() if loss.restarts == self._restarts[number]
            }
        try:
            if lost_engines:
                self._restore(lost_engines)
        except SamplingError as error:
            for number in lost_engines:
                for user in self._list_workers(number):
                    call_actor(user, RolloutWorker.give_up_engine, number, str(error))
        self.announce_replacements()
        return None

    def _list_workers(self, engine: int) -> list[Any]:
        return [worker for worker, numbers in self._workers if engine in numbers]
