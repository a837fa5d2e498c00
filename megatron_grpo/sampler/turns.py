"""One sample's way through its turns: the environment answers each response, or its agent makes them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import GenerationOutput, GenerationRequest
from megatron_grpo.data.trajectory import Span, StopReason, Trajectory
from megatron_grpo.sampler.conversation import Conversation
from megatron_grpo.sampler.endpoint import Endpoint
from megatron_grpo.sampler.engines import EngineClient
from megatron_grpo.sampler.environment_client import EnvironmentClient
from megatron_grpo.sampler.plan import RolloutFailure, RolloutPlan, sample_seed


@dataclass(slots=True)
class Sampled:
    """A sample that is through with its turns."""

    trajectory: Trajectory
    state: Any = None


@dataclass(frozen=True, slots=True)
class Turns:
    """How the samples of one prompt go through their turns."""

    group: int
    """Number of the prompt in its generation batch."""
    datum: DatumSpec
    prompt_ids: NDArray[np.int32]
    """[prompt tokens], int32."""
    plan: RolloutPlan
    environment: EnvironmentClient
    agents: Endpoint | None
    """Where the environment's agent asks the model; None: it has none, and answers turn by turn."""

    async def take(self, sample: int, engine: EngineClient) -> Sampled:
        """A sample's turns, from its beginning.

        Raises:
            RolloutFailure: the environment or its agent failed.
            EngineLostError: only another engine in the place of this one will answer.
        """
        if self.agents is None:
            return await self._answered(sample, engine)
        return await self._acted(sample, engine, self.agents)

    def failed(self, sample: int) -> Trajectory:
        """What is left of a sample none of whose attempts came to an end: its prompt."""
        return self._trajectory(sample, [self.prompt_ids], [], [], "", "stop", None)

    async def _answered(self, sample: int, engine: EngineClient) -> Sampled:
        """One sample whose responses the environment answers."""
        datum, plan = self.datum, self.plan
        state = await self.environment.reset(datum["prompt"], datum["extra_env_info"])
        pieces, length = [self.prompt_ids], len(self.prompt_ids)
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
            turn = await self.environment.step(state, output.text, int(output.token_ids[-1]))
            state = turn.state
            pieces.append(output.token_ids)
            length += len(output.token_ids) + len(turn.observation)
            full = not turn.done and length >= plan.max_total_sequence_length
            stop_reason: StopReason = "length" if full else output.stop_reason
            if turn.done or stop_reason == "length" or len(outputs) == plan.max_turns:
                break
            pieces.append(turn.observation)
        text = "".join(output.text for output in outputs)
        logprobs = [output.logprobs for output in outputs]
        return Sampled(self._trajectory(sample, pieces, spans, logprobs, text, stop_reason, routed), state)

    async def _acted(self, sample: int, engine: EngineClient, agents: Endpoint) -> Sampled:
        """One sample whose turns an agent makes, by its calls."""
        datum, plan = self.datum, self.plan

        def seed(turn: int) -> int:
            return sample_seed(plan.run_seed, plan.step, datum["idx"], sample, turn)

        talk = Conversation(engine, plan.settings, agents.tokenizer, seed, plan.max_total_sequence_length)
        with agents.opened(talk) as access:
            try:
                state = await self.environment.act(datum["prompt"], datum["extra_env_info"], access)
            except RolloutFailure as failure:
                raise talk.failure or failure from None
        if talk.failure is not None:  # the agent made nothing of it, and what it returns is no end of its work
            raise talk.failure
        if not talk.outputs:
            raise RolloutFailure(f"environment {datum['task_name']}: its agent ended without asking the model")
        routed: NDArray[Any] | None = None
        for output in talk.outputs:
            routed = _continued(routed, output.routed)
        text = "".join(output.text for output in talk.outputs)
        logprobs = [output.logprobs for output in talk.outputs]
        stop_reason = talk.outputs[-1].stop_reason
        return Sampled(self._trajectory(sample, talk.pieces, talk.spans, logprobs, text, stop_reason, routed), state)

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
            prompt_idx=self.datum["idx"],
            group=self.group,
            sample=sample,
            token_ids=_joined(pieces),
            spans=spans,
            logprobs=_joined(logprobs) if logprobs else np.empty(0, dtype=np.float32),
            response=response,
            stop_reason=stop_reason,
            loss_multiplier=self.datum["loss_multiplier"],
            task_name=self.datum["task_name"],
            routed=routed,
        )


def _continued(known: NDArray[Any] | None, rows: NDArray[Any] | None) -> NDArray[Any] | None:
    """The experts of a conversation, [tokens, numbers of a token], int8 or int16, after another turn.

    Args:
        known: experts of the conversation's tokens before this turn; None: this turn is the first.
        rows: experts of all tokens up to this turn's last but one: an engine looks at the whole conversation anew.
    """
    if known is None or rows is None:
        return rows
    return np.concatenate([known, rows[len(known) :]])


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays [tokens] of one dtype laid end to end; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
