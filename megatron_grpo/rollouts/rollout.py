"""Rollouts as coroutines: the samples of a prompt run their turns, are retried on failure, and are scored."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest
from megatron_grpo.batch.trajectory import REWARD_REMOVED, SUSPECT_PREFIX, Span, StopReason, Trajectory, list_suspicions
from megatron_grpo.config.data_schema import LEAST_COMPARED, UNUSUALLY_SHORT
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import EnvironmentRequest, Scored
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.endpoint import Endpoint
from megatron_grpo.rollouts.engine_client import EngineClient, Engines
from megatron_grpo.rollouts.environment_client import EnvironmentClient
from megatron_grpo.rollouts.failures import RolloutFailure
from megatron_grpo.rollouts.rollout_settings import RolloutSettings, compute_sample_seed

ATTEMPTS = 2
"""Attempts at a rollout, and at scoring it."""
_USUAL_SHARE = 0.25
"""Share of the median length of a group, below which a rewarded response is unusually short."""


class GroupRollout:
    """The rollouts of one prompt's samples: call `sample`, then `score`."""

    def __init__(
        self,
        group: int,
        datum: DatumSpec,
        settings: RolloutSettings,
        engines: Engines,
        environment: EnvironmentClient,
        agents: Endpoint | None = None,
    ) -> None:
        """
        Args:
            group: number of the prompt in its batch.
            datum: the prompt.
            settings: samples of the prompt, sampling settings, seeds and deadlines.
            engines: the worker's engines, from which a second attempt gets another one.
            environment: environment of the prompt's task.
            agents: endpoint at which the environment's agent calls the model; None: the environment has no agent.
        """
        self._group, self._datum, self._settings = group, datum, settings
        self._engines, self._environment, self._agents = engines, environment, agents
        ids = [token for message in datum["message_log"] for token in message["token_ids"]]
        self._prompt_ids = np.array(ids, dtype=np.int32)
        self._sampled: list[tuple[Trajectory, Any]] = []
        """Each sample with the state of the environment after the last turn."""
        self._deadline = 0.0

    async def sample(self, engine: EngineClient) -> None:
        """Run the turns of every sample, first on this engine, whose load already includes these samples.

        Raises:
            SamplingError: an engine failed.
        """
        self._deadline = asyncio.get_running_loop().time() + self._settings.timeout_s
        samples = [
            asyncio.create_task(self._one(number, engine)) for number in range(self._settings.samples_per_prompt)
        ]
        try:
            self._sampled = await asyncio.gather(*samples)
        except BaseException:
            for sample in samples:
                sample.cancel()
            raise

    async def score(self) -> list[Trajectory]:
        """Score the samples; returns all of them, with scores or with the reason of their failure.

        Raises:
            SamplingError: a process of the environment could not be replaced.
        """
        whole = [(one, state) for one, state in self._sampled if one.failure is None]
        if whole:
            for (one, _), scored in zip(whole, await self._scored(whole), strict=True):
                if isinstance(scored, str):
                    _fail(one, scored)
                else:
                    one.reward, one.correct = scored.reward, scored.correct
                    one.reward_parts, one.reward_errors = scored.parts, scored.errors
                    one.reward_metrics, one.notes = scored.metrics, scored.notes
            judge([one for one, _ in whole], self._environment.leave_out_suspects)
        return [one for one, _ in self._sampled]

    async def _scored(self, samples: list[tuple[Trajectory, Any]]) -> list[Scored]:
        wants_ids = self._environment.reads_token_ids
        requests = [
            EnvironmentRequest(
                prompt=self._datum["prompt"],
                response=one.response,
                stop_reason=one.stop_reason,
                extra_env_info=self._datum["extra_env_info"],
                state=state,
                response_ids=one.response_ids if wants_ids else None,
                trainer_state=self._settings.trainer_state,
            )
            for one, state in samples
        ]
        deadline = self._deadline
        for _ in range(ATTEMPTS):
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._environment.score(requests)
            except TimeoutError:
                deadline = asyncio.get_running_loop().time() + self._settings.timeout_s
        task, limit = self._datum["task_name"], self._settings.timeout_s
        return [f"environment {task}: no score within rollouts.timeout_s={limit:g} s"] * len(samples)

    async def _one(self, sample: int, engine: EngineClient) -> tuple[Trajectory, Any]:
        """Run one sample; if it fails, try again with equal seeds."""
        reason = ""
        try:
            for attempt in range(ATTEMPTS):
                if attempt:
                    # Place before releasing the failed engine's load: otherwise a stuck engine would look idle.
                    failed_on, (engine,) = engine, self._engines.place([1])
                    failed_on.load -= 1
                try:
                    return await self._attempt(sample, engine)
                except TimeoutError:
                    reason = f"{engine.name} did not finish it within rollouts.timeout_s={self._settings.timeout_s:g} s"
                except RolloutFailure as failure:
                    reason = str(failure)
        finally:
            engine.load -= 1
        failed = self._trajectory(sample, [self._prompt_ids], [], "stop")
        _fail(failed, reason)
        return failed, None

    async def _attempt(self, sample: int, engine: EngineClient) -> tuple[Trajectory, Any]:
        """Make one attempt at a sample; it starts over, with equal seeds, whenever the engine is replaced."""
        turns = self._turns_of_environment if self._agents is None else self._turns_of_agent
        while True:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await turns(sample, engine)
            except TimeoutError:
                if not await engine.is_lost():
                    raise
            except EngineLostError:
                pass
            await engine.replaced()

    async def _turns_of_environment(self, sample: int, engine: EngineClient) -> tuple[Trajectory, Any]:
        """Run one sample in which the environment answers the responses."""
        datum, settings = self._datum, self._settings
        state = await self._environment.reset(datum["prompt"], datum["extra_env_info"])
        pieces, length = [self._prompt_ids], len(self._prompt_ids)
        outputs: list[GenerationOutput] = []
        while True:
            request = GenerationRequest(
                prompt_ids=_joined(pieces),
                seed=self._seed(sample, len(outputs)),
                max_new_tokens=settings.max_total_sequence_length - length,
            )
            output = await engine.generate(request, settings.sampling)
            outputs.append(output)
            turn = await self._environment.step(state, output.text, int(output.token_ids[-1]))
            state = turn.state
            pieces.append(output.token_ids)
            length += len(output.token_ids) + len(turn.observation)
            full = not turn.done and length >= settings.max_total_sequence_length
            stop_reason: StopReason = "length" if full else output.stop_reason
            if turn.done or stop_reason == "length" or len(outputs) == settings.max_turns:
                return self._trajectory(sample, pieces, outputs, stop_reason), state
            pieces.append(turn.observation)

    async def _turns_of_agent(self, sample: int, engine: EngineClient) -> tuple[Trajectory, Any]:
        """Run one sample in which the environment's agent calls the model."""
        datum, settings = self._datum, self._settings
        assert self._agents is not None
        talk = Conversation(
            engine,
            settings.sampling,
            self._agents.renderer(datum["task_name"], self._environment.prompts),
            lambda turn: self._seed(sample, turn),
            settings.max_total_sequence_length,
        )
        with self._agents.opened(talk) as access:
            try:
                state = await self._environment.act(datum["prompt"], datum["extra_env_info"], access)
            except RolloutFailure as failure:
                raise talk.failure or failure from None
        if talk.failure is not None:  # the agent swallowed the failure, so its result is discarded
            raise talk.failure
        if not talk.outputs:
            raise RolloutFailure(f"environment {datum['task_name']}: its agent ended without asking the model")
        return self._trajectory(sample, talk.pieces, talk.outputs, talk.outputs[-1].stop_reason), state

    def _seed(self, sample: int, turn: int) -> int:
        return compute_sample_seed(self._settings.run_seed, self._settings.step, self._datum["idx"], sample, turn)

    def _trajectory(
        self,
        sample: int,
        pieces: list[NDArray[np.int32]],
        outputs: list[GenerationOutput],
        stop_reason: StopReason,
    ) -> Trajectory:
        """Make a trajectory of alternating given and sampled pieces ([tokens] each, int32); `outputs`: sampled ones."""
        spans: list[Span] = []
        routed: NDArray[Any] | None = None
        start = 0
        for given, output in zip(pieces[::2], outputs, strict=False):
            start += len(given)
            spans += [Span(start + span.start, start + span.end, span.version) for span in output.spans]
            start += len(output.token_ids)
            if routed is None or output.routed is None:
                routed = output.routed
            else:  # each output covers the whole conversation; tokens keep the experts of their first pass
                routed = np.concatenate([routed, output.routed[len(routed) :]])
        return Trajectory(
            prompt_idx=self._datum["idx"],
            group=self._group,
            sample=sample,
            token_ids=_joined(pieces),
            spans=spans,
            logprobs=_joined([output.logprobs for output in outputs] or [np.empty(0, dtype=np.float32)]),
            response="".join(output.text for output in outputs),
            stop_reason=stop_reason,
            loss_multiplier=self._datum["loss_multiplier"],
            task_name=self._datum["task_name"],
            routed=routed,
        )


def _fail(trajectory: Trajectory, reason: str) -> None:
    trajectory.failure, trajectory.reward, trajectory.correct, trajectory.reward_parts = reason, None, None, {}


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate arrays [tokens] of one dtype; a single array is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def judge(group: Sequence[Trajectory], leave_out: Collection[str]) -> None:
    """Add the figure of unusually short responses to a scored group, and take the rewards of suspect responses away.

    A response without a reward is in no baseline and not in the loss. It counts as incorrect: nothing shows that it is
    right.

    Args:
        group: the samples of one prompt, scored; those without a reward, such as failed ones, are not judged.
        leave_out: names of figures (without suspect/); responses with one of these above 0 lose their reward.
    """
    scored = [(one, one.reward) for one in group if one.reward is not None]
    if len(scored) >= LEAST_COMPARED:
        usual = median(one.response_tokens for one, _ in scored)
        mean = fmean(reward for _, reward in scored)
        for one, reward in scored:
            is_rewarded = reward > mean if one.correct is None else one.correct
            is_short = is_rewarded and one.response_tokens < _USUAL_SHARE * usual
            one.reward_metrics = one.reward_metrics | {SUSPECT_PREFIX + UNUSUALLY_SHORT: float(is_short)}
    for one, reward in scored if leave_out else ():
        found = [name for name in list_suspicions(one.reward_metrics) if name in leave_out]
        one.reward_metrics = one.reward_metrics | {REWARD_REMOVED: float(bool(found))}
        if found:
            one.notes = one.notes | {"left out": f"suspect by {', '.join(found)}; its reward was {reward:g}"}
            one.reward, one.reward_parts, one.correct = None, {}, None if one.correct is None else False
