"""Rollouts as coroutines, with an engine and an environment that are objects: turns, retries, deadlines."""

import asyncio
import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pytest

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.batch.trajectory import Span, StopReason, Trajectory
from megatron_grpo.config.errors import EngineLostError, SamplingError
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import EncodedTurn, EnvironmentRequest, EnvironmentReturn, ScoreOrError
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.engine_client import EngineLeftError
from megatron_grpo.rollouts.environment_client import PROMPT_WORK, PromptWork
from megatron_grpo.rollouts.failures import RolloutFailure
from megatron_grpo.rollouts.rollout import GroupRollout, RolloutSettings, compute_sample_seed
from tests.support.virtual_time import run_at_once

BATCH_SETTINGS = RolloutSettings(
    samples_per_prompt=3,
    sampling=SamplingSettings(max_new_tokens=8),
    run_seed=5,
    generation_batch=2,
    max_total_sequence_length=12,
    max_turns=9,
    timeout_s=0.2,
)
DATUM: DatumSpec = {
    "message_log": [
        {"role": "system", "content": "", "token_ids": [1, 2]},
        {"role": "user", "content": "", "token_ids": [3]},
    ],
    "length": 3,
    "extra_env_info": {"answer": "x"},
    "loss_multiplier": 0.5,
    "idx": 40,
    "task_name": "task",
    "prompt": "what?",
}
SEEDS = [compute_sample_seed(5, 2, 40, sample) for sample in range(3)]


@dataclass
class FakeEngine:
    """Answers with two tokens; `trouble` says by seed what happens first: an exception, or "stuck"."""

    name: str = "generation engine 0"
    number: int = 0
    load: int = 0
    trouble: dict[int, list[Any]] = field(default_factory=dict)
    requests: list[GenerationRequest] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    records: bool = False
    """Whether responses come with routed experts, all of which are the number of the request."""

    restarts: int = 0
    """How often somebody has waited until the engine was replaced."""
    hangs: bool = False
    clock: RolloutClock = field(default_factory=RolloutClock)

    async def is_lost(self) -> bool:
        return self.hangs

    async def wait_replaced(self) -> None:
        self.restarts += 1
        self.hangs = False

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.requests.append(request)
        trouble = self.trouble.get(request.seed, [])
        event = trouble.pop(0) if trouble else None
        if event == "stuck":
            await asyncio.sleep(60)
        if isinstance(event, Exception):
            raise event
        number = len(self.requests)
        return GenerationOutput(
            token_ids=np.array([100 + number, 200 + number], np.int32),
            logprobs=np.array([-number, -number / 2], np.float32),
            text=f"<{number}>",
            stop_reason=self.stop_reason,
            spans=[Span(0, 1, 6), Span(1, 2, 7)],
            routed=np.full((len(request.prompt_ids) + 1, 2), number, np.int8) if self.records else None,
        )

    def assign(self, sizes: list[int]) -> list[Self]:
        self.load += sum(sizes)
        return [self]


@dataclass
class FakeEnvironment:
    """Scores by the length of the text; asks `observations` before it ends a rollout; `trouble` as in FakeEngine."""

    observations: list[list[int]] = field(default_factory=list)
    trouble: list[Any] = field(default_factory=list)
    jobs: list[list[EnvironmentRequest]] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)
    reads_token_ids: bool = False
    leave_out_suspects: tuple[str, ...] = ()
    rewards: list[float | None] = field(default_factory=list)  # of the turns, in order
    turn_images: list[list[StoredImage]] = field(default_factory=list)  # images of the observations
    earlier_images: list[Images] = field(default_factory=list)  # images of the conversation, by turn
    ending: str = ""  # of the last observation

    async def reset(self, prompt: Any, extra_env_info: dict[str, Any], *, is_repeated: bool) -> Any:
        return (prompt, extra_env_info["answer"], ())

    async def step(
        self, state: Any, response: str, last_token: int, images: Images, *, is_repeated: bool
    ) -> EncodedTurn:
        self.last_tokens.append(last_token)
        self.earlier_images.append(images)
        prompt, answer, turns = state
        state = (prompt, answer, (*turns, response))
        reward = self.rewards[len(turns)] if self.rewards else None
        if len(turns) == len(self.observations):
            return EncodedTurn(state=state, reward=reward)
        number = len(turns)
        return EncodedTurn(
            done=False,
            state=state,
            reward=reward,
            observation=np.array(self.observations[number], np.int32),
            images=self.turn_images[number] if self.turn_images else [],
            ending=self.ending if number == len(self.observations) - 1 else "",
        )

    async def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
        self.jobs.append(requests)
        event = self.trouble.pop(0) if self.trouble else None
        if event in ("stuck", "slow"):
            await asyncio.sleep(60 if event == "stuck" else 0.05)
        elif event is not None:
            return list(event)
        return [EnvironmentReturn(float(len(request.response)), True, {"length": 1.0}) for request in requests]

    async def score_apart(self, requests: list[EnvironmentRequest], reason: str) -> list[ScoreOrError]:
        return [reason] * len(requests)


def run(
    engine: FakeEngine,
    environment: FakeEnvironment,
    settings: RolloutSettings = BATCH_SETTINGS,
    datum: DatumSpec = DATUM,
) -> list[Trajectory]:
    async def scene() -> list[Trajectory]:
        group = GroupRollout(4, datum, settings, engine, environment)
        engine.assign([settings.samples_per_prompt])
        await group.sample(engine)
        return await group.score()

    trajectories = run_at_once(scene())
    assert engine.load == 0, "who is through, or has failed, adds no load"
    return trajectories


def test_the_seed_of_a_sample_is_what_it_always_was() -> None:
    digest = hashlib.blake2b(struct.pack("<4q", 5, 2, 40, 1), digest_size=8).digest()
    assert compute_sample_seed(5, 2, 40, 1) == int.from_bytes(digest, "little") >> 2
    different = {compute_sample_seed(*identity) for identity in np.ndindex(2, 2, 2, 2, 2)}
    assert len(different) == 32


def test_tokens_keep_the_experts_that_they_were_sampled_under() -> None:
    """In every turn the engine looks at the whole conversation again, and may choose otherwise."""
    one_sample = replace(BATCH_SETTINGS, samples_per_prompt=1)
    (with_experts,) = run(FakeEngine(records=True), FakeEnvironment(observations=[[7, 8], [9]]), one_sample)
    assert len(with_experts.token_ids) == 3 + 2 + 2 + 2 + 1 + 2
    assert with_experts.routed is not None
    assert with_experts.routed.dtype == np.int8
    assert with_experts.routed[:, 0].tolist() == [1] * 4 + [2] * 4 + [3] * 3, (
        "the last token of a turn passes with the next"
    )
    (without_experts,) = run(FakeEngine(), FakeEnvironment(), one_sample)
    assert without_experts.routed is None
    (failed,) = run(
        FakeEngine(records=True, trouble={SEEDS[0]: [RolloutFailure("no")] * 2}), FakeEnvironment(), one_sample
    )
    assert failed.routed is None
    assert "routed" not in with_experts.to_row()


async def test_all_calls_for_a_prompt_count_as_its_own_work() -> None:
    class Recorder(FakeEnvironment):
        async def step(
            self, state: Any, response: str, last_token: int, images: Images, *, is_repeated: bool
        ) -> EncodedTurn:
            work.append(PROMPT_WORK.get())
            return await super().step(state, response, last_token, images, is_repeated=is_repeated)

        async def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
            work.append(PROMPT_WORK.get())
            return await super().score(requests)

    async def run_group() -> None:
        group = GroupRollout(4, DATUM, BATCH_SETTINGS, FakeEngine(), Recorder())
        await group.sample(FakeEngine())
        await group.score()

    work: list[PromptWork] = []
    await asyncio.gather(run_group(), run_group())
    assert sorted(Counter(map(id, work)).values()) == [4, 4], "of two prompts, three steps and a score each"


def test_a_rollout_has_the_text_of_its_row() -> None:
    trouble = {SEEDS[1]: [RolloutFailure("no"), RolloutFailure("no")]}
    for trajectory in run(FakeEngine(trouble=trouble), FakeEnvironment()):
        assert (trajectory.prompt, trajectory.answer) == (DATUM["prompt"], None)
        assert trajectory.columns == {"answer": str(DATUM["extra_env_info"]["answer"])}


def test_a_single_turn() -> None:
    engine, environment = FakeEngine(), FakeEnvironment()
    trajectories = run(engine, environment)
    assert [request.seed for request in engine.requests] == SEEDS
    assert {request.max_new_tokens for request in engine.requests} == {9}
    trajectory = trajectories[1]
    assert (
        trajectory.prompt_idx,
        trajectory.group,
        trajectory.sample,
        trajectory.loss_multiplier,
        trajectory.stop_reason,
    ) == (40, 4, 1, 0.5, "stop")
    assert trajectory.token_ids.tolist() == [1, 2, 3, 102, 202]
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.logprobs.tolist() == [-2.0, -1.0]
    assert trajectory.spans == [Span(3, 4, 6), Span(4, 5, 7)]
    assert trajectory.engine == 0
    assert (trajectory.response, trajectory.reward, trajectory.correct, trajectory.reward_parts) == (
        "<2>",
        3.0,
        True,
        {"length": 1.0},
    )
    (job,) = environment.jobs
    assert [trajectory.response for trajectory in job] == ["<1>", "<2>", "<3>"]
    assert all((trajectory.prompt, trajectory.extra_env_info) == ("what?", {"answer": "x"}) for trajectory in job)


def test_several_turns_put_observations_between_what_was_sampled() -> None:
    engine, environment = FakeEngine(), FakeEnvironment(observations=[[50, 51], [60]])
    settings = replace(BATCH_SETTINGS, samples_per_prompt=1)
    (trajectory,) = run(engine, environment, settings)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 101, 201, 50, 51, 102, 202, 60, 103, 203]
    assert trajectory.spans == [
        Span(start, start + 1, version) for start, version in zip((3, 4, 7, 8, 10, 11), (6, 7) * 3, strict=True)
    ]
    assert trajectory.logprobs.tolist() == [-1.0, -0.5, -2.0, -1.0, -3.0, -1.5]
    assert [len(request.prompt_ids) for request in engine.requests] == [3, 7, 10]
    assert [request.max_new_tokens for request in engine.requests] == [9, 5, 2]
    assert [request.seed for request in engine.requests] == [
        compute_sample_seed(5, 2, 40, 0, turn) for turn in range(3)
    ]
    assert trajectory.response == "<1><2><3>"
    assert [trajectory.state for trajectory in environment.jobs[0]] == [("what?", "x", ("<1>", "<2>", "<3>"))]


def test_images_of_turns_follow_those_of_the_prompt() -> None:
    images = [StoredImage(name, 2, 2) for name in "abcd"]
    environment = FakeEnvironment(observations=[[50, 51], [60]], turn_images=[images[1:3], images[3:]])
    engine, settings = FakeEngine(), replace(BATCH_SETTINGS, samples_per_prompt=1)
    datum: DatumSpec = {**DATUM, "images": images[:1]}
    (trajectory,) = run(engine, environment, settings, datum)
    assert trajectory.images == images
    by_request = [images[:1], images[:3], images]
    assert [request.images for request in engine.requests] == by_request
    assert environment.earlier_images == by_request, "so that the environment knows how many are left"
    assert datum["images"] == images[:1]
    assert Trajectory.from_row(trajectory.to_row()).images == images
    (cut,) = run(FakeEngine(), environment, replace(settings, max_total_sequence_length=9), datum)
    assert (cut.images, cut.truncated) == (images[:3], True), "an observation without room is left out with its images"


def test_a_turn_with_too_many_images_ends_the_rollout_with_the_reason() -> None:
    image = StoredImage("a", 2, 2)
    environment = FakeEnvironment(observations=[[50], []], turn_images=[[image], []], ending="it has 9 images")
    (trajectory,) = run(FakeEngine(), environment, replace(BATCH_SETTINGS, samples_per_prompt=1))
    assert trajectory.token_ids.tolist() == [1, 2, 3, 101, 201, 50, 102, 202]
    assert (trajectory.truncated, trajectory.images) == (True, [image])
    assert trajectory.notes == {"ended": "it has 9 images"}
    assert trajectory.reward == len("<1><2>"), "it is scored as it is"


def test_rewards_of_turns_are_added_to_that_of_the_score() -> None:
    environment = FakeEnvironment(observations=[[50, 51], [60]], rewards=[0.25, None, -1.0])
    (trajectory,) = run(FakeEngine(), environment, replace(BATCH_SETTINGS, samples_per_prompt=1))
    score = float(len("<1><2><3>"))
    assert trajectory.turn_rewards == [0.25, 0.0, score - 1.0], "the score counts for the last turn"
    assert trajectory.turn_tokens == [2, 2, 2]
    assert trajectory.reward == score - 0.75
    assert Trajectory.from_row(trajectory.to_row()).turn_rewards == trajectory.turn_rewards
    (plain,) = run(FakeEngine(), FakeEnvironment(observations=[[50]]), replace(BATCH_SETTINGS, samples_per_prompt=1))
    assert (plain.turn_rewards, plain.turn_tokens) == ([], [])


def test_a_rollout_ends_where_the_sequence_is_full() -> None:
    settings = replace(BATCH_SETTINGS, samples_per_prompt=1, max_total_sequence_length=6)
    (trajectory,) = run(FakeEngine(), FakeEnvironment(observations=[[50]]), settings)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 101, 201]
    assert trajectory.truncated, "the environment was not through with it"
    (trajectory,) = run(FakeEngine(), FakeEnvironment(), replace(settings, max_total_sequence_length=5))
    assert not trajectory.truncated, "it ended by itself, with the last token that there was room for"


def test_a_rollout_ends_with_its_turns() -> None:
    settings = replace(BATCH_SETTINGS, samples_per_prompt=1, max_turns=2)
    environment = FakeEnvironment(observations=[[50], [60]])
    (trajectory,) = run(FakeEngine(), environment, settings)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 101, 201, 50, 102, 202]
    assert environment.last_tokens == [201, 202]
    assert [trajectory.state for trajectory in environment.jobs[0]] == [("what?", "x", ("<1>", "<2>"))], (
        "it has seen the last turn"
    )


def test_a_rollout_ends_with_a_turn_that_is_cut_off() -> None:
    settings = replace(BATCH_SETTINGS, samples_per_prompt=1)
    (trajectory,) = run(FakeEngine(stop_reason="length"), FakeEnvironment(observations=[[50]]), settings)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 101, 201]
    assert trajectory.truncated


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (RolloutFailure("given up"), "given up"),
        ("stuck", "generation engine 0 did not finish it within rollouts.timeout_s=0.2 s"),
    ],
)
def test_what_fails_once_is_tried_again_and_what_fails_twice_is_marked(trouble: Any, reason: str) -> None:
    engine = FakeEngine(trouble={SEEDS[0]: [trouble], SEEDS[2]: [trouble, trouble]})
    environment = FakeEnvironment()
    first, second, third = run(engine, environment)
    assert [first.failure, second.failure, third.failure] == [None, None, reason]
    assert (third.token_ids.tolist(), third.spans, len(third.logprobs)) == ([1, 2, 3], [], 0)
    assert (third.reward, third.correct, third.reward_parts) == (None, None, {})
    assert (first.sample, first.reward) == (0, 3.0)
    assert sorted(request.seed for request in engine.requests) == sorted([*SEEDS, SEEDS[0], SEEDS[2]])
    assert [len(job) for job in environment.jobs] == [2], "there is nothing to score in the third"


def test_what_a_lost_engine_was_sampling_is_sampled_again_as_often_as_that_happens() -> None:
    """The rollout did not fail: all its turns are asked for again with the same seeds."""
    error = EngineLostError("gone")
    second_turn = compute_sample_seed(5, 2, 40, 0, 1)
    engine = FakeEngine(trouble={SEEDS[0]: [error, error, error], second_turn: [error]})
    (trajectory,) = run(engine, FakeEnvironment(observations=[[50]]), replace(BATCH_SETTINGS, samples_per_prompt=1))
    assert trajectory.failure is None
    assert [request.seed for request in engine.requests] == [SEEDS[0]] * 4 + [second_turn, SEEDS[0], second_turn]
    assert (engine.restarts, engine.load) == (4, 0)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 106, 206, 50, 107, 207]


def test_what_an_engine_that_leaves_was_sampling_is_no_failed_attempt() -> None:
    class Leaving(FakeEngine):
        async def wait_replaced(self) -> None:
            self.number += 1
            raise EngineLeftError

    error = EngineLostError("it has left the run")
    engine = Leaving(trouble={SEEDS[0]: [error, error, RolloutFailure("given up")]})
    (trajectory,) = run(engine, FakeEnvironment(), replace(BATCH_SETTINGS, samples_per_prompt=1))
    assert (trajectory.failure, trajectory.engine) == (None, 2)
    assert [request.seed for request in engine.requests] == [SEEDS[0]] * 4


def test_a_rollout_that_is_late_on_an_engine_that_hangs_waits_for_another() -> None:
    engine = FakeEngine(trouble={SEEDS[0]: ["stuck"]}, hangs=True)
    (trajectory,) = run(engine, FakeEnvironment(), replace(BATCH_SETTINGS, samples_per_prompt=1))
    assert (trajectory.failure, engine.restarts) == (None, 1)


def test_an_engine_that_fails_is_no_matter_of_a_rollout() -> None:
    engine = FakeEngine(trouble={SEEDS[1]: [SamplingError("engine gone")], SEEDS[2]: ["stuck"]})
    with pytest.raises(SamplingError, match="engine gone"):
        run(engine, FakeEnvironment())


def test_a_sample_without_a_score_keeps_what_was_sampled() -> None:
    good = EnvironmentReturn(1.0, True)
    trajectories = run(FakeEngine(), FakeEnvironment(trouble=[[good, "it raised", good]]))
    assert [trajectory.failure for trajectory in trajectories] == [None, "it raised", None]
    bad = trajectories[1]
    assert (bad.reward, bad.correct, bad.response_tokens, bad.response) == (None, None, 2, "<2>")


def test_scoring_that_takes_too_long_is_tried_again_with_the_same_responses() -> None:
    environment = FakeEnvironment(trouble=["stuck"])
    assert [outcome.failure for outcome in run(FakeEngine(), environment)] == [None] * 3
    assert environment.jobs[0] == environment.jobs[1]
    environment = FakeEnvironment(trouble=["stuck", "slow"])
    assert [trajectory.failure for trajectory in run(FakeEngine(), environment)] == [None] * 3, (
        "the second time has its own deadline"
    )
    environment = FakeEnvironment(trouble=["stuck", "stuck"])
    reason = "environment task: no score within rollouts.timeout_s=0.2 s"
    assert [outcome.failure for outcome in run(FakeEngine(), environment)] == [reason] * 3
