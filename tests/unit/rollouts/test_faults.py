"""A response that breaks the code that reads it stays in the loss; a response that a server fails leaves it."""

import asyncio
import pickle
import re
import resource
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import httpx
import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import ResponseError, RunError
from megatron_grpo.data import prompt_renderer
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.environment_worker import EnvironmentWorker, is_outside
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, EnvironmentStatus
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.environment_client import EnvironmentClient
from megatron_grpo.rollouts.rollout import GroupRollout, RolloutSettings
from tests.support.virtual_time import run_at_once

DATUM: DatumSpec = {
    "message_log": [{"role": "user", "content": "", "token_ids": [1, 2, 3]}],
    "length": 3,
    "extra_env_info": {},
    "loss_multiplier": 1.0,
    "idx": 40,
    "task_name": "task",
    "prompt": "what?",
}


class Engine:
    """Writes texts in their order, one a sample and turn; two tokens each."""

    name, number, load = "generation engine 0", 0, 0

    def __init__(self, *texts: str, seconds: float = 0.0) -> None:
        self.clock, self._seconds = RolloutClock(), seconds
        self._texts = list(texts)
        self._by_seed: dict[int, str] = {}

    async def generate(self, request: GenerationRequest, _: SamplingSettings) -> GenerationOutput:
        if request.seed not in self._by_seed:
            self._by_seed[request.seed] = self._texts.pop(0)
        await asyncio.sleep(self._seconds)
        return GenerationOutput(
            token_ids=np.array([7, 8], np.int32),
            logprobs=np.array([-1.0, -2.0], np.float32),
            text=self._by_seed[request.seed],
            stop_reason="stop",
            spans=[Span(0, 2, 4)],
        )

    async def is_lost(self) -> bool:
        return False

    def assign(self, sizes: list[int]) -> list[Self]:
        return [self]


class Process:
    """A worker in this process, which is lost over a response with "die" and does not answer one with "hang"."""

    def __init__(self, environment: Environment) -> None:
        self._worker: Any = EnvironmentWorker.__new__(EnvironmentWorker)
        self._worker._name, self._worker._environment = "task", environment
        self._worker._settings = getattr(environment, "settings", EnvironmentSettings())
        self._status = EnvironmentStatus("here", id(self), environment.multi_turn, environment.agent, False)
        self.start = SimpleNamespace(remote=self._start)
        self.run = SimpleNamespace(remote=self._run)

    async def _start(self) -> EnvironmentStatus:
        return self._status

    async def _run(self, packed: Any) -> Any:
        method, arguments = pickle.loads(pickle.dumps(packed))
        text = repr(arguments)
        await asyncio.sleep(60 if "hang" in text else 0)
        if "die" in text:
            raise ActorDiedError
        return method(self._worker, *arguments)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "elsewhere"))


def run(
    environment: Environment,
    *groups: Sequence[str],
    process_s: float = 0.2,
    rollout_s: float = 30.0,
    engine_s: float = 0.0,
) -> list[list[Trajectory]]:
    """The trajectories of groups, one group after the other; deadlines of a process and of a rollout in seconds."""

    async def scene() -> list[list[Trajectory]]:
        handle: Any = SimpleNamespace(
            name="task",
            config=EnvironmentConfig(timeout_s=process_s),
            settings=EnvironmentSettings(prompts=PromptFormat()),
            actors=[Process(environment)],
            spawn=lambda: Process(environment),
        )
        client = EnvironmentClient(handle, RolloutClock())
        await client.start()
        finished = []
        for number, texts in enumerate(groups):
            settings = RolloutSettings(
                samples_per_prompt=len(texts),
                sampling=SamplingSettings(max_new_tokens=8),
                run_seed=5,
                generation_batch=number,
                max_total_sequence_length=64,
                max_turns=1,
                timeout_s=rollout_s,
            )
            engine: Any = Engine(*texts, seconds=engine_s)
            group = GroupRollout(number, DATUM, settings, engine, client)
            await group.sample(engine)
            finished.append(await group.score())
        return finished

    return run_at_once(scene())


def verdicts(group: Sequence[Trajectory]) -> list[tuple[float | None, bool, bool]]:
    """Reward, whether it is the response's own fault, and whether it left the loss."""
    return [(trajectory.reward, trajectory.fault is not None, trajectory.failure is not None) for trajectory in group]


def rank(prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
    """Group-relative: the place of each completion by length, from 0; it needs at least two."""
    if any("boom" in text for text in completions):
        raise KeyError("boom")
    assert len(completions) > 1 or completions[0] == "alone"
    lengths = sorted(map(len, completions))
    return [float(lengths.index(len(text))) for text in completions]


def length(prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
    if any("boom" in text for text in completions):
        raise ValueError("cannot read this")
    return [float("nan") if "nan" in text else float(len(text)) for text in completions]


def scored_by(function: Any) -> RewardFunctionEnvironment:
    return RewardFunctionEnvironment({"f": function}, {"f": 1.0}, correctness=None)


@pytest.mark.parametrize("bad", ["boom", "nan", "die", "hang"])
def test_one_response_that_breaks_its_reward_function_does_not_cost_the_group(bad: str) -> None:
    (group,) = run(scored_by(length), ["a", bad, "ccc", "dd"])
    assert verdicts(group) == [(1.0, False, False), (0.0, True, False), (3.0, False, False), (2.0, False, False)]
    assert group[1].response_tokens == 2, "it is learnt from"
    assert group[1].correct is None


def test_the_others_are_scored_as_a_group() -> None:
    def relative(completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        if "boom" in completions:
            raise ValueError("no")
        mean = sum(map(len, completions)) / len(completions)
        return [len(text) - mean for text in completions]

    sizes: list[int] = []
    (group,) = run(scored_by(relative), ["a", "boom", "ccccc", "boom"])
    assert [trajectory.reward for trajectory in group] == [-2.0, -2.0, 2.0, -2.0], (
        "a failure pays no better than the worst response"
    )
    assert [trajectory.fault is not None for trajectory in group] == [False, True, False, True]
    assert sizes[:2] == [4, 4]
    assert sizes[-1] == 2


def test_a_function_that_fails_for_everybody_leaves_the_loss() -> None:
    first, second = run(scored_by(rank), ["a", "boom", "ccc"], ["boom", "boom1"])
    assert verdicts(first) == [(None, False, True)] * 3, "it cannot be called for one, so nobody is to blame"
    assert verdicts(second) == [(None, False, True)] * 2
    good, bad = run(scored_by(length), ["a", "bb"], ["boom", "boom"])
    assert verdicts(good) == [(1.0, False, False), (2.0, False, False)]
    assert verdicts(bad) == [(None, False, True)] * 2


def test_a_server_that_is_down_is_nobodys_fault() -> None:
    def ask(completions: list[str], **_: Any) -> list[float]:
        if any("x" in text for text in completions):
            try:
                httpx.get("http://127.0.0.1:1/", timeout=5)
            except httpx.ConnectError as error:
                raise ValueError("no verdict") from error
        return [1.0] * len(completions)

    (group, next_group) = run(scored_by(ask), ["a", "b"], ["a", "x"])
    assert verdicts(group) == [(1.0, False, False)] * 2
    assert verdicts(next_group) == [(None, False, True)] * 2


def test_a_sample_alone_is_compared_with_other_prompts() -> None:
    first, second, third = run(scored_by(length), ["boom"], ["a"], ["boom"])
    assert verdicts(first) == [(None, False, True)], "nothing was ever scored"
    assert verdicts(second) == [(1.0, False, False)]
    assert verdicts(third) == [(0.0, True, False)]


class Talking(Environment):
    """Breaks over a turn with a word; a server answers to others, until it is down."""

    multi_turn = True

    def __init__(self) -> None:
        self.is_down = False

    def step(self, state: Any, response: str) -> Turn:
        if "down" in response:
            self.is_down = True
        if self.is_down or "lost" in response:
            raise {"lost": ConnectionError, "down": RuntimeError}["lost" if "lost" in response else "down"]("gone")
        reward = {"nan": float("nan"), "infinite": -float("inf"), "huge": 1e39}.get(response, 0.5)
        return Turn(state=state, reward=reward, text={"boom": ""}.get(response, response) or [][0])

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=1.0, correct=True) for _ in requests]


@pytest.mark.parametrize("bad", ["boom", "die", "hang", "nan", "infinite", "huge"])
def test_a_turn_that_breaks_the_environment_counts_as_a_wrong_one(bad: str) -> None:
    (group,) = run(Talking(), ["a", bad, "c"])
    assert verdicts(group) == [(1.5, False, False), (0.0, True, False), (1.5, False, False)]
    assert (group[1].correct, group[1].response, group[1].response_tokens) == (False, bad, 2)
    assert group[1].token_ids.tolist() == [1, 2, 3, 7, 8]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if 'large' in m.content %}{{ 'a'.ljust(6000000000) | length }}{% endif %}"
    "{% if 'endless' in m.content %}" + "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3 + "{% endif %}"
    "{% if 'refused' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
)


class Echoing(Environment):
    """Shows the model its own words, by the chat template."""

    multi_turn = True

    def __init__(self) -> None:
        core = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE)
        self.settings = EnvironmentSettings(tokenizer=tokenizer, prompts=PromptFormat())

    def step(self, state: Any, response: str) -> Turn:
        return Turn(done=False, state=state, text=f"you said {response}", reward=0.5)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=1.0, correct=True) for _ in requests]


@pytest.mark.parametrize("bad", ["large", "endless", "refused"])
def test_a_text_that_the_chat_template_cannot_end_counts_as_a_wrong_one(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_renderer, "render_chat", partial(prompt_renderer.render_chat, seconds=0.3))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    (group,) = run(Echoing(), ["a", bad, "c"], process_s=60.0)
    assert verdicts(group) == [(1.5, False, False), (0.0, True, False), (1.5, False, False)]
    reason = {"large": "MemoryError", "endless": "not done with one conversation", "refused": "TemplateError: no"}[bad]
    assert reason in str(group[1].fault)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_turn_that_hangs_until_the_rollouts_deadline_counts_as_a_wrong_one() -> None:
    (group,) = run(Talking(), ["a", "hang", "c"], process_s=60.0, rollout_s=0.4)
    assert verdicts(group) == [(1.5, False, False), (0.0, True, False), (1.5, False, False)]
    assert (group[1].response, group[1].response_tokens) == ("hang", 2)
    assert group[1].fault is not None
    assert re.fullmatch(
        r"environment task: no answer in the last 0\.[34]\d* s of rollouts\.timeout_s=0\.4 s", group[1].fault
    )


def test_where_every_turn_hangs_until_the_deadline_nobody_is_to_blame() -> None:
    (group,) = run(Talking(), ["hang", "hang 2"], process_s=60.0, rollout_s=0.4)
    assert verdicts(group) == [(None, False, True)] * 2


def test_a_slow_engine_is_not_blamed_on_the_turn_that_the_deadline_ends() -> None:
    first, second = run(Talking(), ["a", "b"], ["hang"], process_s=60.0, rollout_s=0.7, engine_s=0.66)
    assert verdicts(first) == [(1.5, False, False)] * 2
    assert verdicts(second) == [(None, False, True)]
    assert second[0].failure == "generation engine 0 did not finish it within rollouts.timeout_s=0.7 s"


def test_a_server_that_is_lost_or_down_for_everybody_leaves_the_loss() -> None:
    (group,) = run(Talking(), ["a", "lost", "c"])
    assert verdicts(group) == [(1.5, False, False), (None, False, True), (1.5, False, False)]
    assert group[1].response_tokens == 0
    first, second = run(Talking(), ["a", "b"], ["down", "c"])
    assert verdicts(first) == [(1.5, False, False)] * 2
    assert verdicts(second) == [(None, False, True)] * 2
    (alone,) = run(Talking(), ["boom"])
    assert verdicts(alone) == [(None, False, True)], "no other response shows that the environment works"


def _make_chained(kind: type[Exception]) -> Exception:
    try:
        try:
            raise kind("inner")
        except kind as error:
            raise ValueError("outer") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("x"), True),
        (TimeoutError(), True),
        (RunError("server lost"), True),
        (ModuleNotFoundError("Could not import module 'AutoTokenizer'"), True),
        (ResponseError("the action took too long"), False),
        (_make_chained(ConnectionRefusedError), True),
        (_make_chained(KeyError), False),
        (FileNotFoundError("what the model wrote"), False),
        (RecursionError(), False),
        (MemoryError(), False),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), False),
    ],
)
def test_what_an_error_says_of_a_server(error: Exception, expected: bool) -> None:
    assert is_outside(error) is expected
