"""What the driver does about engines that rollout workers have lost: it has them replaced, and tells the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.futures import overdue
from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.errors import SamplingError

Restore = Callable[[Mapping[int, str]], None]
"""Puts others in the place of engines that are lost, by number with the reason; SamplingError: it does not."""


def not_replaced(lost: Mapping[int, str]) -> None:
    """A `Restore` where nothing replaces an engine."""
    raise SamplingError("; ".join(dict.fromkeys(lost.values())))


class LostEngines:
    """The workers' engines as the driver knows them."""

    def __init__(self, engines: Sequence[Any], restore: Restore) -> None:
        """
        Args:
            engines: actors in the order of their numbers; whoever replaces one does so in here.
            restore: replaces engines.
        """
        self._engines, self._restore = engines, restore
        self._known = list(engines)
        self._restarts = [0] * len(engines)
        self._users: list[tuple[Any, Sequence[int]]] = []
        self._reports: dict[Any, Any] = {}

    def watch(self, worker: Any, numbers: Sequence[int]) -> None:
        """Listen to a rollout worker that asks these engines."""
        self._users.append((worker, numbers))
        self._reports[worker.lost_engines.remote()] = worker

    def hand_on(self) -> None:
        """Tell workers of engines that were replaced, by a refit for one, since the last call."""
        for number, actor in enumerate(self._engines):
            if actor is not self._known[number]:
                self._known[number] = actor
                self._restarts[number] += 1
                self._tell(number, "replace_engine", actor)

    def wait(self, calls: Sequence[Any], deadline_s: float, what: str, name: Callable[[int], str]) -> None:
        """Return when calls of the workers are over, and replace the engines that they lose meanwhile.

        Args:
            calls: a call of each worker.
            deadline_s: seconds that they have, counted anew when engines were replaced.
            what: the phase, for messages ("generation").
            name: how to call the worker of this number.

        Raises:
            SamplingError: the deadline passed; names the workers that are late.
        """
        end = time.monotonic() + deadline_s
        pending = {call: name(number) for number, call in enumerate(calls)}
        with phase(what):
            while pending:
                over, replaced = self.some(list(pending), end - time.monotonic())
                if replaced:
                    end = time.monotonic() + deadline_s
                elif not over:
                    raise SamplingError(str(overdue(what, list(pending.values()), deadline_s)))
                for call in over:
                    del pending[call]

    def some(self, calls: Sequence[Any], timeout_s: float) -> tuple[list[Any], bool]:
        """Return when a call of a worker is over, or engines that the workers had lost were replaced, or not.

        Args:
            calls: of any workers.
            timeout_s: seconds until it returns in any case.

        Returns:
            The call that is over, if one is, and whether something was done about engines.
        """
        self.hand_on()
        ready, _ = ray.wait([*calls, *self._reports], num_returns=1, timeout=max(timeout_s, 0.0))
        if not ready or ready[0] not in self._reports:
            return ready, False
        self._replace(self._take(ready[0]))
        return [], True

    def _take(self, report: Any) -> dict[int, str]:
        """The engines that a worker reports as lost, but for those that were replaced since; listen to it further."""
        worker = self._reports.pop(report)
        with suppress(RayError):  # a worker that died is told of by its other calls
            losses = ray.get(report)
            self._reports[worker.lost_engines.remote()] = worker
            return {n: loss.reason for n, loss in losses.items() if loss.restarts == self._restarts[n]}
        return {}

    def _replace(self, lost: Mapping[int, str]) -> None:
        if not lost:
            return
        try:
            self._restore(lost)
        except SamplingError as error:
            for number in lost:
                self._tell(number, "give_up_engine", str(error))
        self.hand_on()

    def _tell(self, number: int, method: str, *args: Any) -> None:
        for worker, numbers in self._users:
            if number in numbers:
                getattr(worker, method).remote(number, *args)
