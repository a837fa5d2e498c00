"""Rollouts as coroutines: the samples of a prompt go through their turns, and are scored when all are through."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.data.agents import ModelAccess
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.scores import Scored, ScoringJob, TrainerState, Turn
from megatron_grpo.data.trajectory import Span, StopReason, Trajectory
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.failures import RolloutFailure

ATTEMPTS = 2
"""A rollout that failed is tried once more."""


class Engine(Protocol):
    """Where a rollout samples (`EngineClient`)."""

    name: str
    load: int

    def generate(
        self, request: GenerationRequest, settings: SamplingSettings
    ) -> Coroutine[Any, Any, GenerationOutput]: ...

    async def is_lost(self) -> bool: ...

    async def replaced(self) -> None: ...


class Router(Protocol):
    """Who chooses an engine (`Engines`)."""

    def place(self, sizes: list[int]) -> list[Any]: ...


class AgentHost(Protocol):
    """Where agents ask the model (`Endpoint`)."""

    tokenizer: Any

    def opened(self, conversation: Conversation) -> AbstractContextManager[ModelAccess]: ...


class ScoringEnvironment(Protocol):
    """What answers and scores responses (`EnvironmentClient`)."""

    reads_token_ids: bool

    async def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Any: ...

    async def step(self, state: Any, response: str, last_token: int) -> Turn: ...

    async def score(self, job: ScoringJob) -> list[Scored]: ...

    async def act(
        self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What the rollouts of one generation batch have in common."""

    samples_per_prompt: int
    settings: SamplingSettings
    run_seed: int
    step: int
    """Number of the generation batch: part of every sample's seed."""
    max_total_sequence_length: int
    """Tokens of prompt, responses and observations together."""
    max_turns: int = 1
    """Most responses of one rollout."""
    timeout_s: float
    """Deadline of an attempt at a rollout, and of a second attempt at its scoring."""
    trainer_state: TrainerState = field(default_factory=TrainerState)
    """How far the run is, for reward functions."""


def sample_seed(run_seed: int, step: int, prompt_idx: int, sample: int, turn: int = 0) -> int:
    """Seed of one response, from what identifies it alone: a resumed run or another layout draws equal tokens.

    Returns:
        An integer in [0, 2^62).
    """
    identity = struct.pack("<4q", run_seed, step, prompt_idx, sample) + (struct.pack("<q", turn) if turn else b"")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 2


@dataclass(slots=True)
class _Sampled:
    """A sample that is through with its turns."""

    trajectory: Trajectory
    state: Any = None


class GroupRollout:
    """The samples of one prompt: `sample`, then `score`."""

    def __init__(
        self,
        group: int,
        datum: DatumSpec,
        plan: RolloutPlan,
        router: Router,
        environment: ScoringEnvironment,
        agents: AgentHost | None = None,
    ) -> None:
        """
        Args:
            group: number of the prompt in its generation batch.
            datum: the prompt.
            plan: how to sample.
            router: chooses another engine for a second attempt.
            environment: what answers and scores the prompt's task.
            agents: where the environment's agent asks the model; None: it has none, and answers turn by turn.
        """
        self._agents = agents
        self._group, self._datum, self._plan = group, datum, plan
        self._router, self._environment = router, environment
        ids = [token for message in datum["message_log"] for token in message["token_ids"]]
        self._prompt_ids: NDArray[np.int32] = np.array(ids, dtype=np.int32)
        self._sampled: list[_Sampled] = []
        self._deadline = 0.0

    async def sample(self, engine: Engine) -> None:
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

    async def _scored(self, samples: list[_Sampled]) -> list[Scored]:
        wants_ids = self._environment.reads_token_ids
        job = ScoringJob(
            prompt=self._datum["prompt"],
            extra_env_info=self._datum["extra_env_info"],
            responses=tuple(one.trajectory.response for one in samples),
            stop_reasons=tuple(one.trajectory.stop_reason for one in samples),
            states=tuple(one.state for one in samples),
            response_ids=tuple(one.trajectory.response_ids for one in samples) if wants_ids else (),
            trainer_state=self._plan.trainer_state,
        )
        deadline = self._deadline
        for _ in range(ATTEMPTS):
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._environment.score(job)
            except TimeoutError:
                deadline = asyncio.get_running_loop().time() + self._plan.timeout_s
        task, limit = self._datum["task_name"], self._plan.timeout_s
        return [f"environment {task}: no score within rollouts.timeout_s={limit:g} s"] * len(samples)

    async def _one(self, sample: int, engine: Engine) -> _Sampled:
        """One sample, which is tried again, with equal seeds, when it fails."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                # Chosen while the engine that failed still counts this sample: a stuck one would look idle otherwise.
                failed_on, (engine,) = engine, self._router.place([1])
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
        failed = self._trajectory(sample, [self._prompt_ids], [], [], "", "stop", None)
        _fail(failed, reason)
        return _Sampled(failed)

    async def _attempt(self, sample: int, engine: Engine) -> _Sampled:
        """One attempt at a sample: from its beginning again, with equal seeds, whenever the engine is replaced."""
        while True:
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    return await self._turns(sample, engine)
            except TimeoutError:
                if not await engine.is_lost():
                    raise
            except EngineLostError:
                pass
            await engine.replaced()

    async def _turns(self, sample: int, engine: Engine) -> _Sampled:
        if self._agents is not None:
            return await self._acted(sample, engine, self._agents)
        datum, plan = self._datum, self._plan
        state = await self._environment.reset(datum["prompt"], datum["extra_env_info"])
        pieces, length = [self._prompt_ids], len(self._prompt_ids)
        outputs: list[GenerationOutput] = []
        routed: NDArray[Any] | None = None
        spans: list[Span] = []
        while True:
            request = GenerationRequest(
                prompt_ids=_joined(pieces),
                seed=sample_seed(plan.run_seed, plan.step, datum["idx"], sample, len(outputs)),
                max_new_tokens=plan.max_total_sequence_length - length,
            )
            output = await engine.generate(request, plan.settings)
            outputs.append(output)
            routed = _continued(routed, output.routed)
            spans += [Span(length + span.start, length + span.end, span.version) for span in output.spans]
            turn = await self._environment.step(state, output.text, int(output.token_ids[-1]))
            state = turn.state
            pieces.append(output.token_ids)
            length += len(output.token_ids) + len(turn.observation)
            cut_off = output.stop_reason == "length" or length >= plan.max_total_sequence_length
            if turn.done or cut_off or len(outputs) == plan.max_turns:
                break
            pieces.append(turn.observation)
        text = "".join(output.text for output in outputs)
        logprobs = [output.logprobs for output in outputs]
        stop_reason = outputs[-1].stop_reason
        return _Sampled(self._trajectory(sample, pieces, spans, logprobs, text, stop_reason, routed), state)

    async def _acted(self, sample: int, engine: Engine, agents: AgentHost) -> _Sampled:
        """One sample whose turns an agent makes, by its calls."""
        datum, plan = self._datum, self._plan

        def seed(turn: int) -> int:
            return sample_seed(plan.run_seed, plan.step, datum["idx"], sample, turn)

        talk = Conversation(engine, plan.settings, agents.tokenizer, seed, plan.max_total_sequence_length)
        with agents.opened(talk) as access:
            try:
                state = await self._environment.act(datum["prompt"], datum["extra_env_info"], access)
            except RolloutFailure as failure:
                raise talk.failure or failure from None
        if not talk.outputs:
            raise RolloutFailure(f"environment {datum['task_name']}: its agent ended without asking the model")
        routed: NDArray[Any] | None = None
        for output in talk.outputs:
            routed = _continued(routed, output.routed)
        text = "".join(output.text for output in talk.outputs)
        logprobs = [output.logprobs for output in talk.outputs]
        stop_reason = talk.outputs[-1].stop_reason
        return _Sampled(self._trajectory(sample, talk.pieces, talk.spans, logprobs, text, stop_reason, routed), state)

    def _trajectory(
        self,
        sample: int,
        pieces: list[NDArray[np.int32]],
        spans: list[Span],
        logprobs: list[NDArray[np.float32]],
        response: str,
        stop_reason: StopReason,
        routed: NDArray[Any] | None,
    ) -> Trajectory:
        """A trajectory of pieces [tokens], int32, and log-probabilities [sampled tokens], float32, turn by turn.

        `routed`, [all tokens but the last, numbers of a token], int8 or int16, are the experts of the whole.
        """
        return Trajectory(
            prompt_idx=self._datum["idx"],
            group=self._group,
            sample=sample,
            token_ids=_joined(pieces),
            spans=spans,
            logprobs=_joined(logprobs) if logprobs else np.empty(0, dtype=np.float32),
            response=response,
            stop_reason=stop_reason,
            loss_multiplier=self._datum["loss_multiplier"],
            task_name=self._datum["task_name"],
            routed=routed,
        )


def _fail(trajectory: Trajectory, reason: str) -> None:
    trajectory.failure, trajectory.reward, trajectory.correct, trajectory.reward_parts = reason, None, None, {}


def _continued(known: NDArray[Any] | None, rows: NDArray[Any] | None) -> NDArray[Any] | None:
    """The experts of a conversation, [tokens, numbers of a token], int8 or int16, after another turn.

    Args:
        known: of the turns before, the experts under which their tokens were sampled; None: there were none.
        rows: of all tokens up to this turn's last but one: an engine looks at the whole conversation in every turn.
    """
    if known is None or rows is None:
        return rows
    return np.concatenate([known, rows[len(known) :]])


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays [tokens] of one dtype laid end to end; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
