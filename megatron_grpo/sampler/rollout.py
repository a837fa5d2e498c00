"""Rollouts as coroutines: the samples of a prompt are drawn, again where they failed, and scored when all are there."""

from __future__ import annotations

import asyncio

import numpy as np

from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import EnvironmentRequest, Scored
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.sampler.endpoint import Endpoint
from megatron_grpo.sampler.engines import EngineClient, Engines
from megatron_grpo.sampler.environment_client import EnvironmentClient
from megatron_grpo.sampler.plan import RolloutFailure, RolloutPlan
from megatron_grpo.sampler.turns import Sampled, Turns

ATTEMPTS = 2
"""A rollout that failed is tried once more."""


class GroupRollout:
    """The samples of one prompt: `sample`, then `score`."""

    def __init__(
        self,
        group: int,
        datum: DatumSpec,
        plan: RolloutPlan,
        engines: Engines,
        environment: EnvironmentClient,
        agents: Endpoint | None = None,
    ) -> None:
        """
        Args:
            group: number of the prompt in its generation batch.
            datum: the prompt.
            plan: how to sample.
            engines: chooses another engine for a second attempt.
            environment: what answers and scores the prompt's task.
            agents: where the environment's agent asks the model; None: it has none, and answers turn by turn.
        """
        self._datum, self._plan, self._engines, self._environment = datum, plan, engines, environment
        ids = [token for message in datum["message_log"] for token in message["token_ids"]]
        self._turns = Turns(group, datum, np.array(ids, dtype=np.int32), plan, environment, agents)
        self._sampled: list[Sampled] = []
        self._deadline = 0.0

    async def sample(self, engine: EngineClient) -> None:
        """Let every sample go through its turns, beginning at this engine, which counts them in its load.

        Raises:
            SamplingError: an engine failed.
        """
        self._deadline = asyncio.get_running_loop().time() + self._plan.timeout_s
        samples = [asyncio.create_task(self._one(number, engine)) for number in range(self._plan.samples_per_prompt)]
        try:
            self._sampled = await asyncio.gather(*samples)
        except BaseException:
            for sample in samples:
                sample.cancel()
            raise

    async def score(self) -> list[Trajectory]:
        """All samples, with their scores or the reason why there is none.

        Raises:
            SamplingError: the environment cannot be kept up.
        """
        whole = [one for one in self._sampled if one.trajectory.failure is None]
        if whole:
            for one, scored in zip(whole, await self._scored(whole), strict=True):
                if isinstance(scored, str):
                    _fail(one.trajectory, scored)
                else:
                    one.trajectory.reward, one.trajectory.correct = scored.reward, scored.correct
                    one.trajectory.reward_parts, one.trajectory.reward_errors = scored.parts, scored.errors
                    one.trajectory.reward_metrics, one.trajectory.notes = scored.metrics, scored.notes
        return [one.trajectory for one in self._sampled]

    async def _scored(self, samples: list[Sampled]) -> list[Scored]:
        wants_ids = self._environment.reads_token_ids
        requests = [
            EnvironmentRequest(
                prompt=self._datum["prompt"],
                response=one.trajectory.response,
                stop_reason=one.trajectory.stop_reason,
                extra_env_info=self._datum["extra_env_info"],
                state=one.state,
                response_ids=one.trajectory.response_ids if wants_ids else None,
                trainer_state=self._plan.trainer_state,
            )
            for one in samples
        ]
        deadline = self._deadline
        for _ in range(ATTEMPTS):
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._environment.score(requests)
            except TimeoutError:
                deadline = asyncio.get_running_loop().time() + self._plan.timeout_s
        task, limit = self._datum["task_name"], self._plan.timeout_s
        return [f"environment {task}: no score within rollouts.timeout_s={limit:g} s"] * len(samples)

    async def _one(self, sample: int, engine: EngineClient) -> Sampled:
        """One sample, which is tried again, with equal seeds, when it fails."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                # Chosen while the engine that failed still counts this sample: a stuck one would look idle otherwise.
                failed_on, (engine,) = engine, self._engines.place([1])
                failed_on.load -= 1
            try:
                sampled = await self._attempt(sample, engine)
                engine.load -= 1
                return sampled
            except TimeoutError:
                reason = f"{engine.name} did not finish it within rollouts.timeout_s={self._plan.timeout_s:g} s"
            except RolloutFailure as failure:
                reason = str(failure)
            except BaseException:
                engine.load -= 1
                raise
        engine.load -= 1
        failed = self._turns.failed(sample)
        _fail(failed, reason)
        return Sampled(failed)

    async def _attempt(self, sample: int, engine: EngineClient) -> Sampled:
        """One attempt at a sample: from its beginning again, with equal seeds, whenever the engine is replaced."""
        while True:
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    return await self._turns.take(sample, engine)
            except TimeoutError:
                if not await engine.is_lost():
                    raise
            except EngineLostError:
                pass
            await engine.replaced()


def _fail(trajectory: Trajectory, reason: str) -> None:
    trajectory.failure, trajectory.reward, trajectory.correct, trajectory.reward_parts = reason, None, None, {}
