"""The rollout workers as Ray actors: their engines, their shares of the prompts, and waiting for their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, pairwise
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from megatron_grpo.cluster.futures import gather, overdue
from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.sampler.endpoint import EndpointSettings
from megatron_grpo.sampler.environment_client import STARTUP_S
from megatron_grpo.sampler.worker import RolloutWorker

ENGINES_PER_WORKER = 8
WORKER_NAME = "rollout worker {}".format

Item = TypeVar("Item")


class WorkerGroup:
    """Rollout workers in Ray actors. `start()` returns at once; then call `wait_ready()`."""

    def __init__(
        self,
        number: int | None,
        engines: Sequence[Any],
        environments: Mapping[str, EnvironmentPool],
        *,
        generation_timeout_s: float,
        routed: RoutedForm | None = None,
        endpoint: EndpointSettings | None = None,
    ) -> None:
        """
        Args:
            number: count of workers; None: one for every ENGINES_PER_WORKER engines.
            engines: Ray actors with `generate` and `abort`, in the order of their numbers; empty: nothing is sampled.
            environments: pools of environment processes by task name, not yet started.
            generation_timeout_s: deadline for sampling one generation batch, and for each call on its tokens.
            routed: form of the experts that engines return; None: engines return none.
            endpoint: settings of the endpoints for agents; None: there are no endpoints.
        """
        self._endpoint = endpoint
        self._number, self.engines, self._environments = number, engines, environments
        self.generation_timeout_s, self.routed = generation_timeout_s, routed
        self.actors: list[Any] = []
        self.engines_of: list[range] = []
        """By worker, the numbers of the engines that it uses."""
        self._shares: list[float] = []
        self._turn = count()
        self._starting: dict[int, Any] = {}
        self._started_at = 0.0

    def start(self) -> None:
        """Begin to start the environments and the workers."""
        self._started_at = time.monotonic()
        engines = len(self.engines)
        workers = self._number or max(1, round(engines / ENGINES_PER_WORKER))
        handles = {name: one.start(workers) for name, one in self._environments.items()}
        # Each worker gets neighbouring engines; with more workers than engines, workers share engines.
        starts = [engines * worker // workers for worker in range(workers + 1)]
        self.engines_of = [range(begin, min(max(end, begin + 1), engines)) for begin, end in pairwise(starts)]
        users = [sum(engine in one for one in self.engines_of) for engine in range(engines)]
        self._shares = [sum(1 / users[engine] for engine in one) / max(engines, 1) for one in self.engines_of]
        actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(RolloutWorker)
        for index, numbers in enumerate(self.engines_of):
            worker = actor.remote(
                index,
                engines={number: self.engines[number] for number in numbers},
                environments={name: shares[index] for name, shares in handles.items()},
                generation_timeout_s=self.generation_timeout_s,
                endpoint=None if self._endpoint is None else self._endpoint.of_worker(index),
            )
            self.actors.append(worker)
        self._starting = {number: worker.ready.remote() for number, worker in enumerate(self.actors)}

    def wait_ready(self) -> None:
        """Wait until every worker and its environments are up; RunError if that takes over STARTUP_S from `start`."""
        left = STARTUP_S - (time.monotonic() - self._started_at)
        self.gather(self._starting, max(left, 0.0), "start of rollouts")

    def shared_out(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divide items among the workers in proportion to their engines; each part is contiguous."""
        bounds = [round(len(items) * share) for share in np.cumsum([0.0, *self._shares]).tolist()]
        return [list(items[begin:end]) for begin, end in pairwise(bounds)]

    def next(self) -> int:
        """Number of the worker that does the driver's next piece of work (round robin)."""
        return next(self._turn) % len(self.actors)

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for worker in self.actors:
            ray.kill(worker)
        self.actors = []

    @staticmethod
    def gather(calls: Mapping[int, Any], deadline_s: float, what: str) -> list[Any]:
        """Wait for the answers to calls, given by number of the worker; returns them in the order of the calls.

        Raises:
            SamplingError: a worker failed or missed the deadline.
            RunError: a worker raised this error itself; its class and message are kept.
        """
        names = [WORKER_NAME(worker) for worker in calls]
        try:
            return gather(list(calls.values()), deadline_s=deadline_s, what=what, name=names.__getitem__)
        except RunError as error:
            cause = error.__cause__
            if isinstance(cause, RayTaskError) and isinstance(cause.cause, RunError):
                raise type(cause.cause)(str(cause.cause)) from None
            raise SamplingError(str(error)) from error


Restore = Callable[[Mapping[int, str]], None]
"""Function that replaces lost engines, given by number with the reason; raises SamplingError if it cannot."""


def not_replaced(lost: Mapping[int, str]) -> None:
    """A `Restore` that replaces no engine: raises SamplingError with the reasons."""
    raise SamplingError("; ".join(dict.fromkeys(lost.values())))


class LostEngines:
    """Replaces the engines that rollout workers report as lost."""

    def __init__(self, engines: Sequence[Any], restore: Restore) -> None:
        """
        Args:
            engines: actors in the order of their numbers; `restore` puts replacements into this sequence.
            restore: replaces engines.
        """
        self._engines, self._restore = engines, restore
        self._known = list(engines)
        self._restarts = [0] * len(engines)
        self._users: list[tuple[Any, Sequence[int]]] = []
        self._reports: dict[Any, Any] = {}

    def watch(self, worker: Any, numbers: Sequence[int]) -> None:
        """Listen to the reports of a rollout worker, which uses the engines with these numbers."""
        self._users.append((worker, numbers))
        self._reports[worker.lost_engines.remote()] = worker

    def hand_on(self) -> None:
        """Tell workers about engines that were replaced since the last call, for example by a refit."""
        for number, actor in enumerate(self._engines):
            if actor is not self._known[number]:
                self._known[number] = actor
                self._restarts[number] += 1
                self._tell(number, "replace_engine", actor)

    def wait(self, calls: Mapping[int, Any], deadline_s: float, what: str) -> None:
        """Wait until calls of the workers are over, and replace the engines that are lost meanwhile.

        Args:
            calls: one call of each worker, by the worker's number.
            deadline_s: deadline in seconds, restarted whenever engines are replaced.
            what: the phase, for messages ("generation").

        Raises:
            SamplingError: the deadline passed; the message names the overdue workers.
        """
        end = time.monotonic() + deadline_s
        pending = {call: WORKER_NAME(number) for number, call in calls.items()}
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
        """Wait until one of the calls is over, or a worker reports lost engines, which are then replaced if possible.

        Args:
            calls: calls of any workers.
            timeout_s: most seconds to wait.

        Returns:
            The call that is over, if any, and whether a worker has reported lost engines.
        """
        self.hand_on()
        ready, _ = ray.wait([*calls, *self._reports], num_returns=1, timeout=max(timeout_s, 0.0))
        if not ready or ready[0] not in self._reports:
            return ready, False
        worker, lost = self._reports.pop(ready[0]), {}
        with suppress(RayError):  # if the worker died, its other calls raise the error
            losses = ray.get(ready[0])
            self._reports[worker.lost_engines.remote()] = worker
            lost = {n: loss.reason for n, loss in losses.items() if loss.restarts == self._restarts[n]}
        if lost:
            try:
                self._restore(lost)
            except SamplingError as error:
                for number in lost:
                    self._tell(number, "give_up_engine", str(error))
            self.hand_on()
        return [], True

    def _tell(self, number: int, method: str, *args: Any) -> None:
        for worker, numbers in self._users:
            if number in numbers:
                getattr(worker, method).remote(number, *args)
