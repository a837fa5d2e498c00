"""Rollouts as coroutines: the samples of a prompt run their turns, are retried on failure, and are scored."""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.finished_samples import FinishedSamples, digest_request
from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import (
    REWARD_REMOVED,
    SCORING_RETRIES,
    SUSPECT_PREFIX,
    Span,
    StopReason,
    Trajectory,
    list_suspicions,
)
from megatron_grpo.config.data_schema import MIN_COMPARED, UNUSUALLY_SHORT
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.row_text import describe_row
from megatron_grpo.data.scores import EnvironmentRequest, ScoreOrError, TrainerState, is_reward
from megatron_grpo.rollouts.call_images import CallImages
from megatron_grpo.rollouts.conversation import Conversation, Segment
from megatron_grpo.rollouts.endpoint import Endpoint
from megatron_grpo.rollouts.engine_choice import Engines
from megatron_grpo.rollouts.engine_client import EngineClient, EngineLeftError
from megatron_grpo.rollouts.environment_client import PROMPT_WORK, EnvironmentClient, PromptWork
from megatron_grpo.rollouts.failures import AbandonedCall, ResponseFailure, RolloutFailure, mark_failed, settle_faults
from megatron_grpo.rollouts.repeated_samples import record_repeated_samples

ATTEMPTS = 2  # at a rollout, and at scoring it
# A rollout's deadline that passes during a step is the response's fault from this share of the deadline in the step:
# otherwise a slow engine may have taken the time.
_LONG_STEP = 0.1
ENDING = "ended"  # note of a trajectory: why its environment could not go on
_SHORT_SHARE = 0.25  # a rewarded response below this share of its group's median length is unusually short


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The common settings of the rollouts of one generation batch.

    Example:
        RolloutSettings(
            samples_per_prompt=8, sampling=SamplingSettings(max_new_tokens=512), run_seed=42, generation_batch=7,
            max_total_sequence_length=1024, timeout_s=600.0,
        )
    """

    samples_per_prompt: int
    sampling: SamplingSettings
    run_seed: int
    generation_batch: int  # its number, which is part of every sample's seed
    max_total_sequence_length: int  # of prompt, responses and observations together, in tokens
    max_turns: int = 1  # most responses of one rollout
    timeout_s: float  # deadline of an attempt at a rollout, and of a second attempt at scoring it
    trainer_state: TrainerState = field(default_factory=TrainerState)  # for reward functions
    finished_folder: Path | None = None  # where finished samples are kept for a later start; None: nowhere
    max_age_steps: int = 0  # most steps from the weights of a kept sample's tokens to those that the batch begins with


def compute_sample_seed(run_seed: int, generation_batch: int, prompt_idx: int, sample: int, turn: int = 0) -> int:
    """Compute the seed of one response, in [0, 2^62)."""
    # It depends only on the response's identity, so that a resume or another layout draws equal tokens. The first turn
    # is not part of the identity: its seed is that of a rollout with a single turn.
    identity = struct.pack("<4q", run_seed, generation_batch, prompt_idx, sample)
    identity += struct.pack("<q", turn) if turn else b""
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 2


@dataclass(eq=False)
class GroupRollout:
    """The rollouts of one prompt's samples: call `sample`, then `score`."""

    group: int  # number of the prompt
    datum: DatumSpec
    settings: RolloutSettings
    engines: Engines
    environment: EnvironmentClient
    endpoint: Endpoint | None = None  # for environments with an agent
    finished: FinishedSamples | None = None

    def __post_init__(self) -> None:
        ids = [token for message in self.datum["message_log"] for token in message["token_ids"]]
        self._prompt_ids = np.array(ids, dtype=np.int32)
        self._row = describe_row(self.datum)  # its texts are shared by the samples
        # Each sample with the state of the environment after the last turn.
        self._sampled: list[tuple[Trajectory, Any]] = []
        self._deadline = 0.0
        settings = self.settings
        limits = settings.run_seed, settings.sampling, settings.max_turns, settings.max_total_sequence_length
        images = [image.digest for image in self.datum.get("images", [])]
        self._digest = digest_request(*limits, self.datum["task_name"], ids, *images)

    async def sample(self, engine: EngineClient) -> None:
        """Run every sample, first on this engine, whose load includes them."""
        self._deadline = self.engines.clock.time() + self.settings.timeout_s
        PROMPT_WORK.set(PromptWork())  # for the tasks of the samples, and for `score`
        numbers = range(self.settings.samples_per_prompt)
        samples = [asyncio.create_task(self._run_sample(number, engine)) for number in numbers]
        try:
            self._sampled = await asyncio.gather(*samples)
        except BaseException:  # gather leaves the other samples running
            for sample in samples:
                sample.cancel()
            raise

    async def score(self) -> list[Trajectory]:
        """Score the samples; each gets a score or a failure."""
        group = [trajectory for trajectory, _ in self._sampled]
        sampled = [pair for pair in self._sampled if pair[0].failure is None and pair[0].fault is None]
        if sampled:
            for (trajectory, _), scored in zip(sampled, await self._request_scores(sampled), strict=True):
                if isinstance(scored, str):
                    mark_failed(trajectory, scored)
                elif scored.fault is not None:
                    trajectory.fault = scored.fault
                else:
                    trajectory.reward, trajectory.correct = scored.reward, scored.correct
                    if trajectory.turn_rewards and scored.reward is not None:
                        trajectory.turn_rewards[-1] += scored.reward
                        trajectory.reward = math.fsum(trajectory.turn_rewards)
                    if trajectory.reward is not None and not is_reward(trajectory.reward):
                        mark_failed(trajectory, f"the rewards of its turns add up to {trajectory.reward:g}")
                        continue
                    trajectory.reward_parts, trajectory.reward_errors = scored.parts, scored.errors
                    trajectory.reward_metrics, trajectory.notes = scored.metrics, trajectory.notes | scored.notes
                    if scored.retries:
                        trajectory.reward_metrics = scored.metrics | {SCORING_RETRIES: float(scored.retries)}
            trajectories = [trajectory for trajectory, _ in sampled if trajectory.fault is None]
            flag_suspicious(trajectories, self.environment.leave_out_suspects)
            record_repeated_samples(trajectories, self.settings.sampling.temperature)
        settle_faults(group)
        return group

    async def _request_scores(self, sampled: list[tuple[Trajectory, Any]]) -> list[ScoreOrError]:
        needs_ids = self.environment.reads_token_ids
        requests = [
            EnvironmentRequest(
                prompt=self.datum["prompt"],
                response=trajectory.response,
                stop_reason=trajectory.stop_reason,
                extra_env_info=self.datum["extra_env_info"],
                state=state,
                response_ids=trajectory.response_ids if needs_ids else None,
                trainer_state=self.settings.trainer_state,
            )
            for trajectory, state in sampled
        ]
        # The first attempt shares the deadline of sampling; a second one has the whole time again.
        deadline = self._deadline
        for _ in range(ATTEMPTS):
            try:
                async with self.engines.clock.timeout_at(deadline):
                    return await self.environment.score(requests)
            except TimeoutError:
                deadline = self.engines.clock.time() + self.settings.timeout_s
        task, limit = self.datum["task_name"], self.settings.timeout_s
        reason = f"environment {task}: no score within rollouts.timeout_s={limit:g} s"
        try:
            async with self.engines.clock.timeout(ATTEMPTS * limit):
                return await self.environment.score_apart(requests, reason)
        except TimeoutError:
            return [reason] * len(sampled)

    async def _run_sample(self, sample: int, engine: EngineClient) -> tuple[Trajectory, Any]:
        """Run one sample; a failed one is retried once with equal seeds."""
        failures = list[RolloutFailure]()
        try:
            if (earlier := self._find_finished(sample)) is not None:
                return earlier
            while len(failures) < ATTEMPTS:
                try:
                    is_repeated = any(isinstance(failure, ResponseFailure) for failure in failures)
                    trajectory, state = await self._attempt(sample, engine, is_repeated=is_repeated)
                    trajectory.engine = engine.number
                    if self.finished is not None and trajectory.fault is None:
                        await asyncio.to_thread(self.finished.add, trajectory, state, self._digest)
                    return trajectory, state
                except TimeoutError as error:
                    failures.append(self._explain_delay(error, engine))
                except RolloutFailure as failure:
                    failures.append(failure)
                except EngineLeftError:  # to be sampled by another one
                    pass
                # The next engine is picked before the load of this one is lowered: otherwise a stuck engine would look
                # idle, and would be picked again.
                previous, (engine,) = engine, self.engines.assign([1])
                previous.load -= 1
        finally:
            engine.load -= 1
        return await self._judge_failures(sample, failures), None

    def _find_finished(self, sample: int) -> tuple[Trajectory, bytes | None] | None:
        """Find the sample among those that an earlier start finished."""
        earlier = None if self.finished is None else self.finished.find(self.datum["idx"], sample, self._digest)
        return None if earlier is None else (replace(earlier[0], group=self.group), earlier[1])

    def _explain_delay(self, error: TimeoutError, engine: EngineClient) -> RolloutFailure:
        """Make the failure of an attempt that missed its deadline."""
        timeout_s, call = self.settings.timeout_s, AbandonedCall.find(error.__cause__)
        if call is None or call.trajectory is None or call.worked_s < _LONG_STEP * timeout_s:
            return RolloutFailure(f"{engine.name} did not finish it within rollouts.timeout_s={timeout_s:g} s")
        text = f"no answer in the last {call.worked_s:.3g} s of rollouts.timeout_s={timeout_s:g} s"
        failure = ResponseFailure(f"environment {self.datum['task_name']}: {text}")
        failure.trajectory = call.trajectory
        return failure

    async def _judge_failures(self, sample: int, failures: Sequence[RolloutFailure]) -> Trajectory:
        """Make the trajectory of a sample that failed in every attempt."""
        faults = [failure for failure in failures if isinstance(failure, ResponseFailure)]
        trajectory = faults[-1].trajectory if faults else None
        is_fault = len(faults) == len(failures) and await self.environment.is_working(faults[0])
        if trajectory is not None and is_fault:
            trajectory.fault = str(faults[-1])
            return trajectory
        prompt = Segment([self._prompt_ids], [], self.datum.get("images", []))
        trajectory = self._make_trajectory(sample, [prompt], "stop")
        mark_failed(trajectory, str(failures[-1]))
        return trajectory

    async def _attempt(self, sample: int, engine: EngineClient, *, is_repeated: bool) -> tuple[Trajectory, Any]:
        """Attempt a sample; a replaced engine starts it over."""
        run_turns = self._run_turns if self.endpoint is None else self._run_agent
        while True:
            try:
                async with self.engines.clock.timeout(self.settings.timeout_s):
                    return await run_turns(sample, engine, is_repeated=is_repeated)
            except TimeoutError:
                # A rollout on a lost engine is not to blame for its delay, so this is no failed attempt.
                if not await engine.is_lost():
                    raise
            except EngineLostError:
                pass
            await engine.wait_replaced()

    async def _run_turns(self, sample: int, engine: EngineClient, *, is_repeated: bool) -> tuple[Trajectory, Any]:
        datum, settings, step = self.datum, self.settings, partial(self.environment.step, is_repeated=is_repeated)
        state = await self.environment.reset(datum["prompt"], datum["extra_env_info"], is_repeated=is_repeated)
        pieces, length = [self._prompt_ids], len(self._prompt_ids)
        images = self.datum.get("images", [])
        outputs: list[GenerationOutput] = []
        rewards: list[float | None] = []
        # A turn's prompt is the tokens so far, never text that is tokenized again: training needs the sampled tokens.
        while True:
            request = GenerationRequest(
                prompt_ids=_concatenate(pieces),
                seed=self._compute_seed(sample, len(outputs)),
                max_new_tokens=settings.max_total_sequence_length - length,
                images=images,
            )
            output = await engine.generate(request, settings.sampling)
            outputs.append(output)
            pieces.append(output.token_ids)
            try:
                turn = await step(state, output.text, int(output.token_ids[-1]), images)
            except (ResponseFailure, asyncio.CancelledError) as error:
                failure = error if isinstance(error, ResponseFailure) else AbandonedCall.find(error)
                if failure is not None:
                    segments = [Segment(pieces, outputs, images)]
                    failure.trajectory = self._make_trajectory(sample, segments, output.stop_reason)
                    if any(reward is not None for reward in rewards):
                        failure.trajectory.turn_rewards = [0.0] * len(outputs)
                        failure.trajectory.turn_tokens = [len(output.token_ids) for output in outputs]
                raise
            state = turn.state
            rewards.append(turn.reward)
            length += len(output.token_ids) + len(turn.observation)
            # An observation is only context for a further response: without room for one, it is dropped.
            is_full = not turn.done and (bool(turn.ending) or length >= settings.max_total_sequence_length)
            stop_reason: StopReason = "length" if is_full else output.stop_reason
            if turn.done or stop_reason == "length" or len(outputs) == settings.max_turns:
                trajectory = self._make_trajectory(sample, [Segment(pieces, outputs, images)], stop_reason)
                trajectory.notes = {ENDING: turn.ending} if turn.ending else {}
                if any(reward is not None for reward in rewards):
                    trajectory.turn_rewards = [reward or 0.0 for reward in rewards]
                    trajectory.turn_tokens = [len(output.token_ids) for output in outputs]
                return trajectory, state
            pieces.append(turn.observation)
            images = [*images, *turn.images]

    async def _run_agent(self, sample: int, engine: EngineClient, *, is_repeated: bool) -> tuple[Trajectory, Any]:
        datum, settings, act = self.datum, self.settings, partial(self.environment.act, is_repeated=is_repeated)
        assert self.endpoint is not None
        renderer = self.endpoint.get_renderer(datum["task_name"], self.environment.prompts)
        seed, length = partial(self._compute_seed, sample), settings.max_total_sequence_length
        run = self.environment.images
        images = None if run is None else CallImages(run)
        conversation = Conversation(engine, settings.sampling, renderer, seed, length, self.endpoint.texts, images)
        with self.endpoint.open_rollout(conversation) as access:
            try:
                state = await act(datum["prompt"], datum["extra_env_info"], access, datum.get("images", []))
            except RolloutFailure as failure:
                if conversation.failure is None and conversation.responses and isinstance(failure, ResponseFailure):
                    failure.trajectory = self._make_agent_trajectory(sample, conversation)
                raise conversation.failure or failure from None
        if conversation.failure is not None:  # the agent swallowed the failure, so its result is discarded
            raise conversation.failure
        if not conversation.responses:
            raise RolloutFailure(f"environment {datum['task_name']}: its agent ended without asking the model")
        return self._make_agent_trajectory(sample, conversation), state

    def _make_agent_trajectory(self, sample: int, conversation: Conversation) -> Trajectory:
        segments, stop_reason = conversation.list_segments(), conversation.last.output.stop_reason
        return self._make_trajectory(sample, segments, stop_reason)

    def _compute_seed(self, sample: int, turn: int) -> int:
        settings = self.settings
        return compute_sample_seed(settings.run_seed, settings.generation_batch, self.datum["idx"], sample, turn)

    def _make_trajectory(self, sample: int, segments: Sequence[Segment], stop_reason: StopReason) -> Trajectory:
        """Make a trajectory of a rollout's segments, laid end to end."""
        spans: list[Span] = []
        start = 0
        for segment in segments:
            # A failed sample has its prompt alone, so there may be one more context than outputs.
            for piece, output in zip_longest(segment.pieces[::2], segment.outputs):
                start += len(piece)
                if output is not None:
                    spans += [Span(start + span.start, start + span.end, span.version) for span in output.spans]
                    start += len(output.token_ids)
        outputs = [output for segment in segments for output in segment.outputs]
        images = [image for segment in segments for image in segment.images]
        has_counts = len(segments) > 1 and images
        return Trajectory(
            prompt_idx=self.datum["idx"],
            group=self.group,
            sample=sample,
            token_ids=_concatenate([piece for segment in segments for piece in segment.pieces]),
            segment_tokens=[sum(map(len, segment.pieces)) for segment in segments] if len(segments) > 1 else [],
            spans=spans,
            logprobs=_concatenate([output.logprobs for output in outputs] or [np.empty(0, dtype=np.float32)]),
            response="".join(output.text for output in outputs),
            stop_reason=stop_reason,
            loss_multiplier=self.datum["loss_multiplier"],
            task_name=self.datum["task_name"],
            routed=_join_routed(segments),
            images=images,
            segment_images=[len(segment.images) for segment in segments] if has_counts else [],
            **self._row,
        )


def _join_routed(segments: Sequence[Segment]) -> NDArray[np.uint8] | None:
    parts: list[NDArray[Any]] = []
    for segment in segments:
        routed: NDArray[Any] | None = None
        for output in segment.outputs:
            if routed is None or output.routed is None:
                routed = output.routed
            else:  # each output covers the whole conversation; tokens keep the experts of their first pass
                routed = np.concatenate([routed, output.routed[len(routed) :]])
        if routed is None:
            return None
        # The engine never runs the last token of a segment; a row of zeros has no record.
        parts += [*([np.zeros_like(routed[:1])] if parts else []), routed]
    return _concatenate(parts)


def _concatenate(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)  # a single piece is not copied


def flag_suspicious(group: Sequence[Trajectory], leave_out: Collection[str]) -> None:
    """Flag unusually short rewarded responses in a prompt's samples; remove suspect rewards.

    A response loses its reward if one of its suspicions is in `leave_out` (names without suspect/): baselines and the
    loss leave it out. It counts as incorrect, because nothing shows that it is right.
    """
    scored = [(trajectory, trajectory.reward) for trajectory in group if trajectory.reward is not None]
    # The environment may call a response correct; where it does not say, a reward above the mean counts.
    if len(scored) >= MIN_COMPARED:
        median_tokens = median(trajectory.response_tokens for trajectory, _ in scored)
        mean = fmean(reward for _, reward in scored)
        for trajectory, reward in scored:
            is_rewarded = reward > mean if trajectory.correct is None else trajectory.correct
            is_short = is_rewarded and trajectory.response_tokens < _SHORT_SHARE * median_tokens
            trajectory.reward_metrics = trajectory.reward_metrics | {SUSPECT_PREFIX + UNUSUALLY_SHORT: float(is_short)}
    for trajectory, reward in scored if leave_out else ():
        suspicions = [name for name in list_suspicions(trajectory.reward_metrics) if name in leave_out]
        trajectory.reward_metrics = trajectory.reward_metrics | {REWARD_REMOVED: float(bool(suspicions))}
        if suspicions:
            note = f"suspect by {', '.join(suspicions)}; its reward was {reward:g}"
            trajectory.notes = trajectory.notes | {"left out": note}
            trajectory.reward, trajectory.reward_parts = None, {}
            trajectory.correct = None if trajectory.correct is None else False
