"""Rollouts whose turns an agent makes: what becomes of its calls, and of its failures. No sockets: it asks directly."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.images import Images
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ScoreOrError
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.call_texts import CallTexts
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.failures import ResponseFailure, RolloutFailure
from megatron_grpo.rollouts.partitions import concatenate_trajectories
from megatron_grpo.rollouts.rollout import GroupRollout, RolloutSettings, compute_sample_seed
from tests.support.direct_conversation import deliver_at_once
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

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class Host:
    """Gives agents the conversation itself."""

    def __init__(self, tokens: int = 1000) -> None:
        self._tokens = Tokens(tokens)
        self.texts = CallTexts()

    def get_renderer(self, task: str, prompts: PromptFormat) -> PromptRenderer:
        return PromptRenderer(self._tokens, prompts)

    @contextmanager
    def open_rollout(self, conversation: Conversation) -> Iterator[Any]:
        yield deliver_at_once(conversation)
        conversation.end()


class Environment:
    reads_token_ids = False
    leave_out_suspects = ()
    prompts, images = PromptFormat(), None

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.jobs: list[list[EnvironmentRequest]] = []

    async def act(
        self, prompt: Any, extra_env_info: dict[str, Any], access: Any, images: Images, *, is_repeated: bool
    ) -> Any:
        assert (prompt, extra_env_info) == ("what?", {"answer": "x"})
        try:
            return await self._agent(access)
        except Exception as error:  # noqa: BLE001 - in a process of its own it comes back as a text
            raise RolloutFailure(f"environment task: {type(error).__name__}") from None

    async def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
        self.jobs.append(requests)
        return [EnvironmentReturn(float(request.state), True) for request in requests]


class Engine:
    """Two tokens an answer: the length of the prompt, and 7."""

    name, number, load = "generation engine 0", 0, 2

    def __init__(self, trouble: Exception | None = None) -> None:
        self.asked: list[GenerationRequest] = []
        self.clock = RolloutClock()
        self._trouble = trouble

    async def generate(self, request: GenerationRequest, _: SamplingSettings) -> GenerationOutput:
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

    def assign(self, sizes: list[int]) -> list[Self]:
        return [self]


def rollouts(
    agent: Agent, engine: Engine, make_environment: Callable[[Agent], Environment] = Environment
) -> tuple[list[Trajectory], Environment]:
    environment = make_environment(agent)

    async def run() -> list[Trajectory]:
        group: Any = GroupRollout(3, DATUM, BATCH_SETTINGS, engine, environment, Host())  # type: ignore[arg-type]
        await group.sample(engine)
        return await group.score()

    return asyncio.run(run()), environment


def test_calls_become_one_trajectory_and_what_the_agent_returns_is_scored() -> None:
    async def agent(model: Conversation) -> int:
        first = await model.complete([5, 6, 8], None)
        await model.complete([5, 6, 8, *first.output.token_ids.tolist(), 9], None)
        return 11

    engine = Engine()
    trajectories, environment = rollouts(agent, engine)
    for sample, trajectory in enumerate(trajectories):
        assert (trajectory.group, trajectory.sample, trajectory.prompt_idx, trajectory.failure) == (3, sample, 40, None)
        assert trajectory.token_ids.tolist() == [5, 6, 8, 3, 7, 9, 6, 7]
        assert trajectory.spans == [Span(3, 5, 4), Span(6, 8, 4)]
        assert trajectory.logprobs.tolist()[0::2] == [-1.0, -1.0]
        assert trajectory.response == "<3><6>"
        assert trajectory.truncated
        assert trajectory.reward == 11.0
        assert trajectory.routed is not None
        assert trajectory.routed[:, 0].tolist() == [3, 3, 3, 3, 6, 6, 6], "each token keeps those of its first pass"
    assert {request.seed for request in engine.asked} == {
        compute_sample_seed(5, 2, 40, sample, turn) for sample in range(2) for turn in range(2)
    }
    (job,) = environment.jobs
    assert [trajectory.state for trajectory in job] == [11, 11]


@pytest.mark.parametrize("silent", [True, False])
def test_an_agent_that_fails_or_asks_nothing_is_a_failed_rollout(silent: bool) -> None:
    async def agent(model: Conversation) -> None:
        if not silent:
            raise ValueError

    trajectories, _ = rollouts(agent, Engine())
    text = "environment task: its agent ended without asking the model" if silent else "environment task: ValueError"
    assert [trajectory.failure for trajectory in trajectories] == [text, text]
    assert trajectories[0].reward is None


class BreakingEnvironment(Environment):
    """An environment whose agents raise errors over the model's text; `is_sound`: other agents end well."""

    def __init__(self, agent: Agent, *, is_sound: bool) -> None:
        super().__init__(agent)
        self._is_sound = is_sound

    async def act(
        self, prompt: Any, extra_env_info: dict[str, Any], access: Any, images: Images, *, is_repeated: bool
    ) -> Any:
        try:
            return await super().act(prompt, extra_env_info, access, images, is_repeated=is_repeated)
        except RolloutFailure as failure:
            raise ResponseFailure(str(failure)) from None

    async def is_working(self, failure: ResponseFailure) -> bool:
        return self._is_sound


@pytest.mark.parametrize("is_sound", [True, False])
@pytest.mark.parametrize("attempts", [1, 2])
def test_an_agent_that_fails_after_the_models_text_is_at_fault_if_it_does_so_twice_and_others_work(
    is_sound: bool, attempts: int
) -> None:
    begun = 0

    async def agent(model: Conversation) -> int:
        nonlocal begun
        begun += 1
        number = begun
        await model.complete([5, 6], None)
        if number <= 2 * attempts:  # of two samples
            raise KeyError
        return 11

    trajectories, _ = rollouts(agent, Engine(), partial(BreakingEnvironment, is_sound=is_sound))
    reason = "environment task: KeyError"
    for sample in trajectories:
        if attempts == 1:
            assert (sample.reward, sample.fault, sample.failure) == (11.0, None, None)
        elif is_sound:
            assert (sample.reward, sample.fault, sample.failure, sample.response) == (0.0, reason, None, "<2>")
        else:
            assert (sample.reward, sample.fault, sample.failure, sample.response) == (None, None, reason, "")


def test_an_engine_that_fails_under_an_agent_is_the_engines_failure() -> None:
    async def agent(model: Conversation) -> None:
        await model.complete([5], None)

    with pytest.raises(SamplingError, match="the engine is gone"):
        rollouts(agent, Engine(SamplingError("the engine is gone")))
    trajectories, _ = rollouts(agent, Engine(RolloutFailure("it was given up")))
    assert [trajectory.failure for trajectory in trajectories] == ["it was given up"] * 2


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
    assert [trajectory.failure for trajectory in trajectories] == ["it was given up"] * 2
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
    assert [(trajectory.failure, trajectory.reward) for trajectory in trajectories] == [(None, 1.0)] * 2


def test_an_agent_may_go_on_after_a_refused_call() -> None:
    async def agent(model: Conversation) -> int:
        await model.complete([5], None)
        with pytest.raises(BadCallError):
            await model.complete([1000], None)
        return 1

    trajectories, _ = rollouts(agent, Engine())
    assert [trajectory.token_ids.tolist() for trajectory in trajectories] == [[5, 1, 7]] * 2


def test_branches_and_new_beginnings_become_segments() -> None:
    async def agent(model: Conversation) -> int:
        await model.complete([5, 6])  # 2 7
        await model.complete([5, 6, 2, 7, 8])  # 5 7
        await model.complete([5, 6, 2, 7, 9])  # a branch: 5 7
        await model.complete([4])  # an edited history: 1 7
        return 3

    (trajectory, _), _ = rollouts(agent, Engine())
    assert trajectory.segment_tokens == [7, 7, 3]
    assert trajectory.token_ids.tolist() == [5, 6, 2, 7, 8, 5, 7, 5, 6, 2, 7, 9, 5, 7, 4, 1, 7]
    assert trajectory.spans == [Span(2, 4, 4), Span(5, 7, 4), Span(12, 14, 4), Span(15, 17, 4)]
    assert trajectory.segments == trajectory.outcome.segments == [[7, 4], [7, 2], [3, 2]]
    assert (trajectory.tokens, trajectory.response_tokens, trajectory.reward) == (17, 8, 3.0)
    assert trajectory.routed is not None
    assert trajectory.routed[:, 0].tolist() == [2, 2, 2, 5, 5, 5, 0, 5, 5, 5, 5, 5, 5, 0, 1, 1]
    parts = trajectory.split_segments()
    assert [part.token_ids.tolist() for part in parts] == [[5, 6, 2, 7, 8, 5, 7], [5, 6, 2, 7, 9, 5, 7], [4, 1, 7]]
    assert [part.spans for part in parts] == [[Span(2, 4, 4), Span(5, 7, 4)], [Span(5, 7, 4)], [Span(1, 3, 4)]]
    assert np.concatenate([part.logprobs for part in parts]).tolist() == trajectory.logprobs.tolist()
    assert [len(part.routed) for part in parts if part.routed is not None] == [6, 6, 2]


class Branching:
    """An engine whose tokens are all different, so that each is recognised."""

    name = "generation engine 0"
    number = 0

    def __init__(self) -> None:
        self.clock, self.load, self.sampled = RolloutClock(), 2, 0

    async def generate(self, request: GenerationRequest, _: SamplingSettings) -> GenerationOutput:
        await asyncio.sleep(0)
        count = 1 + request.seed % 3
        tokens = np.arange(self.sampled, self.sampled + count, dtype=np.int32) + 100
        self.sampled += count
        version = int(tokens[0]) % 5
        return GenerationOutput(
            token_ids=tokens, logprobs=-tokens / 8, text="x", stop_reason="stop", spans=[Span(0, count, version)]
        )

    def assign(self, sizes: list[int]) -> list[Self]:
        return [self]


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 4)), min_size=1, max_size=12)


@given(actions=ACTIONS)
@settings(max_examples=60)
def test_every_sampled_token_is_trained_on_exactly_once(actions: list[tuple[int, int, int]]) -> None:
    """Whatever an agent does: go on, edit, shorten, branch, and all that several times at once."""
    prompts: dict[int, list[int]] = {}  # tokens before each sampled token, by that token
    responses: list[Any] = []

    async def call(model: Conversation, prompt: list[int]) -> None:
        response = await model.complete(prompt)
        tokens = response.output.token_ids.tolist()
        prompts.update({token: [*prompt, *tokens[:index]] for index, token in enumerate(tokens)})
        responses.append(response)

    async def agent(model: Conversation) -> int:
        prompts.clear()
        responses.clear()
        for kind, number, count in actions:
            before = responses[number % len(responses)].tokens.tolist() if responses else [1]
            if kind == 1:  # an edited history
                before[number % len(before)] = 2
            elif kind == 2:  # a shortened one
                before = before[: 1 + number % len(before)]
            added = [3 + number % 50] * (number % 3) if responses else [3]
            await asyncio.gather(*(call(model, [*before, *added]) for _ in range(count)))
        return 1

    sole: Any = replace(BATCH_SETTINGS, samples_per_prompt=1, max_total_sequence_length=1000)
    group: Any = GroupRollout(3, DATUM, sole, Branching(), Environment(agent), Host(2000))  # type: ignore[arg-type]
    asyncio.run(group.sample(group.engines))
    ((prompt_group, _),) = group._sampled
    assert prompt_group.failure is None
    trained = [token for part in prompt_group.split_segments() for token in part.response_ids.tolist()]
    assert sorted(trained) == sorted(prompts), "each one once"
    for part in prompt_group.split_segments():
        logprobs = iter(part.logprobs.tolist())
        for span in part.spans:
            for position in range(span.start, span.end):
                token = int(part.token_ids[position])
                assert part.token_ids[:position].tolist() == prompts[token], (
                    "behind the tokens that it was drawn behind"
                )
                assert next(logprobs) == -token / 8
        assert next(logprobs, None) is None
    versions = {int(prompt_group.token_ids[span.start]) % 5 for span in prompt_group.spans}
    assert versions == {span.version for span in prompt_group.spans}
    assert prompt_group.response_tokens == sum(sampled for _, sampled in prompt_group.sequences) == len(trained)
    batch = StepBatch.from_outcomes(Config(), [prompt_group.outcome])
    assert int(batch.response_tokens.sum()) == len(trained)
    arrays = [concatenate_trajectories([part]) for part in prompt_group.split_segments()]
    assert sorted(int(token) for array in arrays for token in array["token_ids"][array["sampled"]]) == sorted(trained)
