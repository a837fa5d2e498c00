"""A process that runs rollouts, as a Ray actor: it holds what they produced, and the driver holds references to it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.environments.pool import EnvironmentHandle
from megatron_grpo.sampler.endpoint import Endpoint, EndpointSettings
from megatron_grpo.sampler.engines import EngineClient, EngineLoss, Engines
from megatron_grpo.sampler.environment_client import EnvironmentClient
from megatron_grpo.sampler.plan import RolloutPlan
from megatron_grpo.sampler.rollout import GroupRollout
from megatron_grpo.sampler.shards import Bundler, Collected, collected

PACE_S = 0.02
"""Groups that are complete within this time of each other are told of together: few messages instead of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything that one rollout worker is built from."""

    index: int
    engines: dict[int, Any]
    """Engine actors that this worker asks, by number of the engine."""
    environments: Mapping[str, EnvironmentHandle]
    """Processes that this worker has for itself, by task name."""
    generation_timeout_s: float
    """Deadline for the sampling of one generation batch."""
    startup_timeout_s: float
    """Deadline for an environment's process to come up."""
    endpoint: EndpointSettings | None = None
    """Address at which agents ask the model; None: there are no agents."""


class RolloutWorker:
    """Ray actor. The rollouts that it puts into the object store live as long as a reference to them."""

    def __init__(self, settings: WorkerSettings) -> None:
        begin_process_log(f"rollout worker {settings.index}")
        self._settings = settings
        user = f"worker{settings.index}"
        self._engines = Engines([EngineClient(actor, index, user) for index, actor in settings.engines.items()])
        self._environments: dict[str, EnvironmentClient] = {}
        self._endpoint = None if settings.endpoint is None else Endpoint(settings.endpoint)
        self._generated: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._complete: dict[int, list[Trajectory]] = {}
        """Groups by number that `hand_over` has not been asked for."""

    @phase("start")
    async def ready(self) -> None:
        """Return when every environment's processes are up; SamplingError when one does not come up."""
        limit = self._settings.startup_timeout_s
        self._environments = {name: EnvironmentClient(one, limit) for name, one in self._settings.environments.items()}
        await asyncio.gather(*(client.start() for client in self._environments.values()))
        if self._endpoint is not None:
            await self._endpoint.start()

    @phase("rollouts")
    async def collect(self, batch: int, plan: RolloutPlan, prompts: list[tuple[int, DatumSpec]]) -> Collected:
        """Sample and score the responses to some prompts.

        Args:
            batch: number of this call, for `generated`.
            plan: samples of each prompt, sampling settings, seeds and deadlines.
            prompts: each with its number in the generation batch.

        Raises:
            SamplingError: an engine failed, or an environment cannot be kept up.
        """
        generated = self._generated[batch]
        bundler = Bundler(len(prompts))
        try:
            async for place, trajectories in self._groups(plan, prompts, generated):
                bundler.add(place, trajectories)
        finally:
            generated.set()
        return bundler.finish(self._take_remarks())

    async def collect_each(self, plan: RolloutPlan, prompts: list[tuple[int, DatumSpec]]) -> AsyncIterator[list[int]]:
        """As `collect`, but each group is kept until `hand_over` asks for it; a streaming generator of Ray.

        Args:
            plan: samples of each prompt, sampling settings, seeds and deadlines.
            prompts: each with a number that none of this worker's other groups has.

        Yields:
            Numbers of some prompts whose groups are complete.
        """
        arrived: list[int] = []
        some = asyncio.Event()

        async def follow() -> None:
            async for place, trajectories in self._groups(plan, prompts, asyncio.Event()):
                number = prompts[place][0]
                self._complete[number] = trajectories
                arrived.append(number)
                some.set()

        following = asyncio.create_task(follow())
        following.add_done_callback(lambda _: some.set())
        with phase("rollouts"):
            try:
                while not following.done() or arrived:
                    await some.wait()
                    if not following.done():
                        await asyncio.sleep(PACE_S)
                    some.clear()
                    numbers, arrived = arrived, []
                    if numbers:
                        yield numbers
                await following
            finally:
                following.cancel()

    async def hand_over(self, numbers: list[int]) -> Collected:
        """Groups that are complete, in the order of these numbers; they are forgotten here.

        Not what `collect_each` yields: references within what a generator yields do not keep objects alive.
        """
        return collected([self._complete.pop(number) for number in numbers], self._take_remarks())

    async def _groups(
        self, plan: RolloutPlan, prompts: list[tuple[int, DatumSpec]], generated: asyncio.Event
    ) -> AsyncIterator[tuple[int, list[Trajectory]]]:
        """The groups as they are complete, each with the place of its prompt; `generated` is set when all are sampled.

        Raises:
            SamplingError: an engine failed, or an environment cannot be kept up.
        """
        deadline = asyncio.create_task(self._engines.lose_late(self._settings.generation_timeout_s))
        left = len(prompts)

        async def through(place: int, group: GroupRollout, engine: EngineClient) -> tuple[int, list[Trajectory]]:
            nonlocal left
            await group.sample(engine)
            left -= 1
            if not left:
                deadline.cancel()
                generated.set()
            return place, await group.score()

        tasks: list[asyncio.Task[tuple[int, list[Trajectory]]]] = []
        try:
            engines = self._engines.place([plan.samples_per_prompt] * len(prompts))
            for place, ((number, datum), engine) in enumerate(zip(prompts, engines, strict=True)):
                environment = self._environments[datum["task_name"]]
                agents = self._endpoint if environment.agent else None
                group = GroupRollout(number, datum, plan, self._engines, environment, agents)
                tasks.append(asyncio.create_task(through(place, group, engine)))
            for complete in asyncio.as_completed(tasks):
                yield await complete
        finally:
            deadline.cancel()
            for task in tasks:
                task.cancel()

    def _take_remarks(self) -> list[str]:
        """What became of environments' processes since it was last asked."""
        remarks = [text for client in self._environments.values() for text in client.remarks]
        for client in self._environments.values():
            client.remarks.clear()
        return remarks

    async def generated(self, batch: int) -> None:
        """Return when the sampling of this call of `collect` is over, or it has failed."""
        await self._generated[batch].wait()
        del self._generated[batch]

    async def lost_engines(self) -> dict[int, EngineLoss]:
        """Return as soon as engines are lost: which, and why. Their rollouts wait for one of the next two calls."""
        return await self._engines.losses()

    async def replace_engine(self, number: int, actor: Any) -> None:
        """Ask another actor in the place of an engine; what the one before has not answered is asked again."""
        self._engines.by_number(number).replace(actor)

    async def give_up_engine(self, number: int, reason: str) -> None:
        """Let rollouts that need an engine fail with this text: nothing takes its place."""
        self._engines.by_number(number).give_up(reason)

    async def on_thread(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments) on a thread of this worker, in a phase of this name: work on the tokens of a step."""
        with phase(name):
            return await asyncio.to_thread(function, *arguments)
