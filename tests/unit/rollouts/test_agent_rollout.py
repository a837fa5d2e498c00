"""Rollouts whose turns an agent makes: what becomes of its calls, and of its failures. No sockets: it asks directly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ScoreOrError
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.conversation import BadCallError, Conversation
from megatron_grpo.rollouts.failures import RolloutFailure
from megatron_grpo.rollouts.rollout import GroupRollout, RolloutSettings, compute_sample_seed
from tests.unit.rollouts.test_rollout import DATUM

BATCH_SETTINGS = RolloutSettings(
    samples_per_prompt=2,
    sampling=SamplingSettings(max_new_tokens=8),
    run_seed=5,
    generation_batch=2,
    max_total_sequence_length=40,
    timeout_s=5.0,
)
Agent = Callable[[Conversation], Awaitable[Any]]


class Tokens:
    """A tokenizer of many tokens; the agents here give tokens, not text."""

    def __len__(self) -> int:
        return 1000


class Host:
    """Gives agents the conversation itself."""

    def get_renderer(self, task: str, prompts: PromptFormat) -> PromptRenderer:
        return PromptRenderer(Tokens(), prompts)

    @contextmanager
    def open_rollout(self, conversation: Conversation) -> Iterator[Any]:
        yield conversation
        conversation.end()


class Environment:
    reads_token_ids = False
    leave_out_suspects = ()
    prompts = PromptFormat()

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.jobs: list[list[EnvironmentRequest]] = []

    async def act(self, prompt: Any, extra_env_info: dict[str, Any], access: Any) -> Any:
        assert (prompt, extra_env_info) == ("what?", {"answer": "x"})
        try:
            return await self._agent(access)
        except Exception as error:  # noqa: BLE001 - in a process of its own it comes back as a text
            raise RolloutFailure(f"environment task: {type(error).__name__}") from None

    async def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
        self.jobs.append(requests)
        return [EnvironmentReturn(float(one.state), True) for one in requests]


class Engine:
    """Two tokens an answer: the length of the prompt, and 7."""

    name, load = "generation engine 0", 2

    def __init__(self, trouble: Exception | None = None) -> None:
        self.asked: list[GenerationRequest] = []
        self.clock = RolloutClock()
        self._trouble = trouble

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.asked.append(request)
        if self._trouble is not None:
            raise self._trouble
        return GenerationOutput(
            token_ids=np.array([len(request.prompt_ids), 7], np.int32),
            logprobs=np.array([-1.0, -len(self.asked)], np.float32),
            text=f"<{len(request.prompt_ids)}>",
            stop_reason="length",
            spans=[Span(0, 2, 4)],
            routed=np.full((len(request.prompt_ids) + 1, 1), len(request.prompt_ids), np.int8),
        )

    def assign(self, sizes: list[int]) -> list[Engine]:
        return [self]


def rollouts(agent: Agent, engine: Engine) -> tuple[list[Trajectory], Environment]:
    environment = Environment(agent)

    async def run() -> list[Trajectory]:
        group: Any = GroupRollout(3, DATUM, BATCH_SETTINGS, engine, environment, Host())  # type: ignore[arg-type]
        await group.sample(engine)
        return await group.score()

    return asyncio.run(run()), environment


def test_calls_become_one_trajectory_and_what_the_agent_returns_is_scored() -> None:
    async def agent(model: Conversation) -> int:
        first = await model.complete([5, 6, 8], None)
        await model.complete([5, 6, 8, *first.token_ids.tolist(), 9], None)
        return 11

    engine = Engine()
    trajectories, environment = rollouts(agent, engine)
    for sample, one in enumerate(trajectories):
        assert (one.group, one.sample, one.prompt_idx, one.failure) == (3, sample, 40, None)
        assert one.token_ids.tolist() == [5, 6, 8, 3, 7, 9, 6, 7]
        assert one.spans == [Span(3, 5, 4), Span(6, 8, 4)]
        assert one.logprobs.tolist()[0::2] == [-1.0, -1.0]
        assert one.response == "<3><6>"
        assert one.truncated
        assert one.reward == 11.0
        assert one.routed is not None
        assert one.routed[:, 0].tolist() == [3, 3, 3, 3, 6, 6, 6], "each token keeps those of its first pass"
    assert {request.seed for request in engine.asked} == {
        compute_sample_seed(5, 2, 40, sample, turn) for sample in range(2) for turn in range(2)
    }
    (job,) = environment.jobs
    assert [one.state for one in job] == [11, 11]


@pytest.mark.parametrize("silent", [True, False])
def test_an_agent_that_fails_or_asks_nothing_is_a_failed_rollout(silent: bool) -> None:
    async def agent(model: Conversation) -> None:
        if not silent:
            raise ValueError

    trajectories, _ = rollouts(agent, Engine())
    text = "environment task: its agent ended without asking the model" if silent else "environment task: ValueError"
    assert [one.failure for one in trajectories] == [text, text]
    assert trajectories[0].reward is None


def test_an_engine_that_fails_under_an_agent_is_the_engines_failure() -> None:
    async def agent(model: Conversation) -> None:
        await model.complete([5], None)

    with pytest.raises(SamplingError, match="the engine is gone"):
        rollouts(agent, Engine(SamplingError("the engine is gone")))
    trajectories, _ = rollouts(agent, Engine(RolloutFailure("it was given up")))
    assert [one.failure for one in trajectories] == ["it was given up"] * 2


@pytest.mark.parametrize("asked_before", [False, True])
def test_an_agent_that_passes_over_a_failure_of_the_engine_is_a_failed_rollout(asked_before: bool) -> None:
    async def agent(model: Conversation) -> int:
        if asked_before:
            await model.complete([5], None)
        engine._trouble = RolloutFailure("it was given up")
        with contextlib.suppress(RolloutFailure):
            await model.complete([5, 1, 7, 9] if asked_before else [5], None)
        engine._trouble = None
        return 1

    engine = Engine()
    trajectories, environment = rollouts(agent, engine)
    assert [one.failure for one in trajectories] == ["it was given up"] * 2
    assert environment.jobs == []


def test_an_agent_may_ask_again_what_the_engine_failed_over() -> None:
    async def agent(model: Conversation) -> int:
        engine._trouble = RolloutFailure("it was given up")
        with pytest.raises(RolloutFailure):
            await model.complete([5], None)
        engine._trouble = None
        await model.complete([5], None)
        return 1

    engine = Engine()
    trajectories, _ = rollouts(agent, engine)
    assert [(one.failure, one.reward) for one in trajectories] == [(None, 1.0)] * 2


def test_an_agent_may_go_on_after_a_refused_call() -> None:
    async def agent(model: Conversation) -> int:
        await model.complete([5], None)
        with pytest.raises(BadCallError):
            await model.complete([6], None)
        return 1

    trajectories, _ = rollouts(agent, Engine())
    assert [one.token_ids.tolist() for one in trajectories] == [[5, 1, 7]] * 2
