"""The rollout worker, a Ray actor that runs rollouts; it holds their tokens, and the driver holds references."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.finished_samples import FinishedSamples
from megatron_grpo.batch.rollout_files import StepFacts, StepRecord, read_recorded_rollouts
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import WORKER_NAME, begin_process_log
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.environments.environment_processes import EnvironmentHandle
from megatron_grpo.generation.vllm_requests import iterate_finished
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts import partitions
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings
from megatron_grpo.rollouts.engine_choice import Engines
from megatron_grpo.rollouts.engine_client import EngineClient, EngineLoss
from megatron_grpo.rollouts.environment_client import EnvironmentClient
from megatron_grpo.rollouts.partitions import PackedGroups, TokenFunction
from megatron_grpo.rollouts.rollout import GroupRollout, RolloutSettings

ABANDON_POLL_S = 0.02


class RolloutWorker:
    """Ray actor that runs rollouts, and puts them into the object store."""

    def __init__(
        self,
        index: int,
        *,
        engines: dict[int, Any],
        environments: Mapping[str, EnvironmentHandle],
        generation_timeout_s: float,
        endpoint: EndpointSettings | None,
    ) -> None:
        """Use these engines, by number, and environments, by task name."""
        begin_process_log(WORKER_NAME(index))
        self._index, self._user = index, f"worker{index}"
        self._generation_timeout_s = generation_timeout_s
        self._engines = Engines([EngineClient(actor, number, self._user) for number, actor in engines.items()])
        clock = self._engines.clock
        self._environments = {name: EnvironmentClient(handle, clock) for name, handle in environments.items()}
        self._endpoint = None if endpoint is None else Endpoint(endpoint)
        self._sampled: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)  # by number of the batch
        # Complete groups, by numbers of batch and prompt, until `hand_over` takes them.
        self._complete: dict[tuple[int, int], list[Trajectory]] = {}
        self._under_way: dict[int, Mapping[asyncio.Task[Any], int]] = {}  # by number of the batch, its groups

    @phase("start")
    async def start(self) -> None:
        """Wait until every environment is up; SamplingError otherwise."""
        await asyncio.gather(*(client.start() for client in self._environments.values()))
        if self._endpoint is not None:
            await self._endpoint.start()

    async def collect(
        self, batch: int, settings: RolloutSettings, prompts: list[tuple[int, DatumSpec]]
    ) -> AsyncIterator[list[int]]:
        """Sample and score responses to prompts; yields numbers of those whose groups are complete.

        It is called as a streaming generator of Ray. Raises SamplingError if an engine failed, or a process of an
        environment could not be replaced.
        """
        sampled, groups_to_sample = self._sampled[batch], len(prompts)
        deadline = asyncio.create_task(self._engines.mark_overdue_lost(self._generation_timeout_s))

        async def run_group(group: GroupRollout, engine: EngineClient) -> list[Trajectory]:
            nonlocal groups_to_sample
            await group.sample(engine)
            groups_to_sample -= 1
            if not groups_to_sample:  # from here on only environments work, which have deadlines of their own
                deadline.cancel()
                sampled.set()
            return await group.score()

        pending: dict[asyncio.Task[list[Trajectory]], int] = {}
        finished_samples = await self._open_finished_samples(settings)
        try:
            engines = self._engines.assign([settings.samples_per_prompt] * len(prompts))
            for (number, datum), engine in zip(prompts, engines, strict=True):
                environment = self._environments[datum["task_name"]]
                endpoint = self._endpoint if environment.has_agent else None
                group = GroupRollout(number, datum, settings, self._engines, environment, endpoint, finished_samples)
                pending[asyncio.create_task(run_group(group, engine))] = number
            self._under_way[batch] = pending
            with phase("rollouts"):
                async for finished in iterate_finished(pending):
                    if any(task.cancelled() for task in finished.values()):
                        return  # `abandon`
                    for number, task in finished.items():
                        self._complete[batch, number] = task.result()
                    yield list(finished)
        finally:
            deadline.cancel()
            sampled.set()
            for task in pending:
                task.cancel()
            self._under_way.pop(batch, None)

    async def abandon(self) -> None:
        """End the rollouts under way, and forget complete groups."""
        for task in [task for groups in self._under_way.values() for task in groups]:
            task.cancel()
        while self._under_way:
            await asyncio.sleep(ABANDON_POLL_S)
        self._complete.clear()

    async def _open_finished_samples(self, settings: RolloutSettings) -> FinishedSamples | None:
        folder, newest = settings.finished_folder, settings.trainer_state.global_step
        if folder is None:
            return None
        versions = range(newest - settings.max_age_steps, newest + 1)
        return await asyncio.to_thread(FinishedSamples, folder, settings.generation_batch, self._index, versions)

    async def hand_over(self, complete: list[tuple[int, int]]) -> tuple[PackedGroups, list[str]]:
        """Return and forget groups (batch, prompt), and remarks for the log."""
        # `collect` does not yield the groups: Ray frees objects whose only reference is inside a value of a streaming
        # generator.
        remarks = [text for client in self._environments.values() for text in client.remarks]
        for client in self._environments.values():
            client.remarks.clear()
        return partitions.store_groups([self._complete.pop(key) for key in complete]).to_message(), remarks

    async def wait_sampled(self, batch: int) -> None:
        await self._sampled[batch].wait()
        del self._sampled[batch]

    async def wait_for_losses(self) -> dict[int, EngineLoss]:
        # Rollouts on these engines wait until the engines are replaced or given up.
        return await self._engines.wait_for_losses()

    async def stop_clock(self) -> None:
        self._engines.clock.stop()

    async def restart_clock(self) -> None:
        self._engines.clock.restart()

    # The driver tells all workers about an engine, which some do not use.

    async def replace_engine(self, number: int, actor: Any) -> None:
        if (client := self._engines.find(number)) is not None:
            client.replace(actor)

    async def give_up_engine(self, number: int, reason: str) -> None:
        if (client := self._engines.find(number)) is not None:
            client.give_up(reason)

    async def use_engines(self, engines: Mapping[int, tuple[Any, int]]) -> None:
        """Assign rollouts to these engines alone: by number, actor and replacements.

        Other engines finish what they have.
        """
        for client in self._engines.clients:
            client.is_leaving = client.number not in engines
        for number, (actor, restarts) in engines.items():
            if self._engines.find(number) is None:
                self._engines.add(EngineClient(actor, number, self._user, restarts))

    async def forget_idle_engines(self) -> dict[int, int]:
        return self._engines.forget_idle()

    async def hand_back(self, number: int) -> None:
        self._engines.hand_back(number)

    # The functions of these calls run on a thread, so that rollouts continue meanwhile.

    @phase("build partitions")
    async def build_partitions(
        self, groups: PackedGroups, located: Sequence[NDArray[np.int32]], routed: RoutedForm | None
    ) -> tuple[NDArray[Any], ...]:
        return await asyncio.to_thread(partitions.build_partitions, groups, located, routed)

    @phase("compute")
    async def compute(
        self, fn: TokenFunction, batch: StepBatch, fields: Sequence[str], arguments: Sequence[Any]
    ) -> tuple[dict[str, list[Any]], Any]:
        return await asyncio.to_thread(partitions.compute_over_tokens, fn, batch, fields, arguments)

    @phase("read rollouts")
    async def load(self, file: Path) -> tuple[StepFacts, PackedGroups]:
        try:
            facts, groups = await asyncio.to_thread(read_recorded_rollouts, file)
        except (OSError, ValueError) as error:
            raise RunError(f"the recorded rollouts cannot be read: {file} {error}") from None
        return facts, (await asyncio.to_thread(partitions.store_groups, groups)).to_message()

    @phase("write rollouts")
    async def dump(
        self, groups: PackedGroups, chosen: list[list[int]], batch: StepBatch | None, file: Path, record: StepRecord
    ) -> None:
        await asyncio.to_thread(partitions.dump_rollouts, groups, chosen, batch, file, record)
