"""The rollout worker, a Ray actor that runs rollouts; it holds their tokens, and the driver holds references."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.cluster.process_names import WORKER_NAME
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.environments.environment_processes import EnvironmentHandle
from megatron_grpo.generation.vllm_requests import iterate_finished
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from megatron_grpo.rollouts.engine_client import EngineClient, EngineLoss, Engines
from megatron_grpo.rollouts.environment_client import EnvironmentClient
from megatron_grpo.rollouts.rollout import GroupRollout
from megatron_grpo.rollouts.rollout_settings import RolloutSettings
from megatron_grpo.rollouts.shards import Collected, collected


class RolloutWorker:
    """Ray actor that runs rollouts. Rollouts stay in the object store as long as a reference to them exists."""

    def __init__(
        self,
        index: int,
        *,
        engines: dict[int, Any],
        environments: Mapping[str, EnvironmentHandle],
        generation_timeout_s: float,
        endpoint: EndpointSettings | None,
    ) -> None:
        """`engines` and `environments`: this worker's share, by number and by task name (`RolloutWorkers.start`)."""
        begin_process_log(WORKER_NAME(index))
        self._generation_timeout_s = generation_timeout_s
        self._engines = Engines([EngineClient(actor, n, f"worker{index}") for n, actor in engines.items()])
        self._environments = {name: EnvironmentClient(handle) for name, handle in environments.items()}
        self._endpoint = None if endpoint is None else Endpoint(endpoint)
        self._generated: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._complete: dict[tuple[int, int], list[Trajectory]] = {}
        """Complete groups, by numbers of batch and prompt, until `hand_over` takes them."""

    @phase("start")
    async def ready(self) -> None:
        """Wait until the processes of every environment are up; SamplingError if one does not start."""
        await asyncio.gather(*(client.start() for client in self._environments.values()))
        if self._endpoint is not None:
            await self._endpoint.start()

    async def collect(
        self, batch: int, settings: RolloutSettings, prompts: list[tuple[int, DatumSpec]]
    ) -> AsyncIterator[list[int]]:
        """Sample and score responses to prompts; each group is kept here until `hand_over` takes it.

        It is called as a streaming generator of Ray.

        Args:
            batch: number of the batch among those that the driver has begun (`PendingBatch.batch`).
            settings: samples of each prompt, sampling settings, seeds and deadlines.
            prompts: prompts with their numbers in the batch.

        Yields:
            Numbers of prompts whose groups have become complete.

        Raises:
            SamplingError: an engine failed, or a process of an environment could not be replaced.
        """
        generated, left = self._generated[batch], len(prompts)
        deadline = asyncio.create_task(self._engines.lose_overdue(self._generation_timeout_s))

        async def through(group: GroupRollout, engine: EngineClient) -> list[Trajectory]:
            nonlocal left
            await group.sample(engine)
            left -= 1
            if not left:
                deadline.cancel()
                generated.set()
            return await group.score()

        waiting: dict[asyncio.Task[list[Trajectory]], int] = {}
        try:
            engines = self._engines.place([settings.samples_per_prompt] * len(prompts))
            for (number, datum), engine in zip(prompts, engines, strict=True):
                environment = self._environments[datum["task_name"]]
                agents = self._endpoint if environment.agent else None
                group = GroupRollout(number, datum, settings, self._engines, environment, agents)
                waiting[asyncio.create_task(through(group, engine))] = number
            with phase("rollouts"):
                async for done in iterate_finished(waiting):
                    for number, task in done.items():
                        self._complete[batch, number] = task.result()
                    yield list(done)
        finally:
            deadline.cancel()
            generated.set()
            for task in waiting:
                task.cancel()

    async def hand_over(self, complete: list[tuple[int, int]]) -> Collected:
        """Return complete groups, given by numbers of batch and prompt, and forget them.

        `collect` cannot yield the groups: references inside a value that a generator yields do not keep objects alive.
        """
        remarks = [text for client in self._environments.values() for text in client.remarks]
        for client in self._environments.values():
            client.remarks.clear()
        return collected([self._complete.pop(key) for key in complete], remarks)

    async def generated(self, batch: int) -> None:
        """Wait until the sampling of a batch is complete or has failed."""
        await self._generated[batch].wait()
        del self._generated[batch]

    async def lost_engines(self) -> dict[int, EngineLoss]:
        """Wait until engines are lost; returns losses by number. Rollouts wait until these are replaced or given up."""
        return await self._engines.losses()

    async def replace_engine(self, number: int, actor: Any) -> None:
        """Use another actor in place of an engine; requests that the previous one has not answered are sent again."""
        self._engines.by_number(number).replace(actor)

    async def give_up_engine(self, number: int, reason: str) -> None:
        """Let rollouts on an engine fail with this text, because the engine is not replaced."""
        self._engines.by_number(number).give_up(reason)

    async def on_thread(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function of shards.py on a thread of this worker, in the phase `what`; returns its result."""
        with phase(what):
            return await asyncio.to_thread(function, *arguments)
