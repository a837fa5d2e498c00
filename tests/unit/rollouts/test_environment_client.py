"""Calls to an environment's processes, with processes that are objects of this one: sharing out, loss and retry."""

import asyncio
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, EnvironmentStatus
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.environment_client import PROMPT_WORK, EnvironmentClient, PromptWork
from megatron_grpo.rollouts.failures import ResponseFailure, RolloutFailure
from tests.support.virtual_time import run_at_once


class FakeProcess:
    """Scores a response by its length. One of "raise", "die", "hang" in a response makes it do so."""

    def __init__(self, *, comes_up: bool = True) -> None:
        self.comes_up = comes_up
        self.calls: list[tuple[str, ...]] = []  # the responses of each
        self.pid = id(self)
        self.start = SimpleNamespace(remote=self._start)
        self.run = SimpleNamespace(remote=self._run)

    async def _start(self) -> EnvironmentStatus:
        if not self.comes_up:
            raise RayTaskError("start", "", RunError("reward function f is gone"))
        return EnvironmentStatus(node_id="here", pid=self.pid, multi_turn=True, has_agent=False, reads_token_ids=False)

    async def _run(self, packed: Any) -> Any:
        method, (first, *rest) = pickle.loads(pickle.dumps(packed))
        texts = tuple(request.response for request in first) if method is EnvironmentWorker.score else (first,)
        self.calls.append(texts)
        await asyncio.sleep(0)
        if "die" in texts:
            raise ActorDiedError
        if "hang" in texts:
            await asyncio.sleep(60)
        return self._answer(method, (first, *rest))

    @staticmethod
    def _answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if method is EnvironmentWorker.score:
            responses = [request.response for request in arguments[0]]
            return [
                "it raised" if request == "raise" else EnvironmentReturn(float(len(request)), True)
                for request in responses
            ]
        return Turn(state=arguments) if arguments[0] != "raise" else "it raised"


class Handle:
    """Some processes, and those that take their place, in order."""

    def __init__(self, *processes: FakeProcess, spares: tuple[FakeProcess, ...] = ()) -> None:
        self.name, self.config, self.settings = "task", EnvironmentConfig(timeout_s=0.2), EnvironmentSettings()
        self.actors = list(processes)
        self.spares = list(spares)
        self.spawned: list[FakeProcess] = []

    def spawn(self) -> FakeProcess:
        self.spawned.append(self.spares.pop(0) if self.spares else FakeProcess())
        return self.spawned[-1]


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeProcess]]:
    """Processes that were ended, in order."""
    ended: list[FakeProcess] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "elsewhere"))
    return ended


def job(*responses: str) -> list[EnvironmentRequest]:
    return [
        EnvironmentRequest(prompt="p", response=response, stop_reason="stop", extra_env_info={})
        for response in responses
    ]


def scores(handle: Handle, *groups: tuple[str, ...]) -> list[list[Any]]:
    """Reward of each response, or what was said of it."""

    async def scene() -> list[list[Any]]:
        client = EnvironmentClient(handle, RolloutClock())
        await client.start()
        results = await asyncio.gather(*(client.score(job(*group)) for group in groups))
        losses = [remark for remark in client.remarks if "takes its place" in remark]
        assert len(losses) == len(handle.spawned), "of every process that is lost"
        for score in (score for result in results for score in result if not isinstance(score, str) and score.fault):
            assert (score.reward, score.correct) == (0.0, None)
        return [
            [score if isinstance(score, str) else score.fault or score.reward for score in result] for result in results
        ]

    return run_at_once(scene())


def test_calls_are_shared_out_one_at_a_time() -> None:
    handle = Handle(FakeProcess(), FakeProcess())
    groups = [("a" * (number + 1), "b") for number in range(8)]
    assert scores(handle, *groups) == [[number + 1.0, 1.0] for number in range(8)]
    assert sorted(call for process in handle.actors for call in process.calls) == sorted(groups), "each once"
    assert [len(process.calls) for process in handle.actors] == [4, 4]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("die", "environment task: its process ended over this response"),
        ("hang", "environment task: no answer within env.task.timeout_s=0.2 s"),
    ],
)
@pytest.mark.parametrize("processes", [1, 3])
def test_only_what_a_process_is_lost_over_twice_fails(
    bad: str, reason: str, processes: int, killed: list[FakeProcess]
) -> None:
    handle = Handle(*(FakeProcess() for _ in range(processes)))
    assert scores(handle, ("a", bad, "ccc"), ("dddd",), (bad,)) == [[1.0, reason, 3.0], [4.0], [reason]]
    everyone = [*handle.actors, *handle.spawned]
    assert len(killed) == len(handle.spawned)
    calls = Counter(call for process in everyone for call in process.calls)
    group = ("a", bad, "ccc")
    assert (calls[group], calls["a", "ccc"]) == (2, 1)
    assert calls[(bad,)] == 3, "two attempts at it, and one of the group alone to see who is to blame"
    assert calls[("dddd",)] > 1, "the proof that scoring works"


def test_what_was_raised_is_told_and_loses_no_process(killed: list[FakeProcess]) -> None:
    assert scores(Handle(FakeProcess()), ("a", "raise"), ("bb",)) == [[1.0, "it raised"], [2.0]]
    assert not killed


def test_who_stops_waiting_is_not_asked_for() -> None:
    handle = Handle(FakeProcess())

    async def scene() -> None:
        client = EnvironmentClient(handle, RolloutClock())
        await client.start()
        given_up = asyncio.create_task(client.score(job("x")))
        task = asyncio.create_task(client.score(job("y")))
        await asyncio.sleep(0)
        given_up.cancel()
        assert [result.reward for result in await task] == [1.0]  # type: ignore[union-attr]

    run_at_once(scene())
    assert handle.actors[0].calls == [("y",)]


def test_resets_and_steps_are_calls_too() -> None:
    async def scene(call: Callable[[EnvironmentClient], Any]) -> Any:
        client = EnvironmentClient(Handle(FakeProcess()), RolloutClock())
        await client.start()
        return await call(client)

    assert run_at_once(scene(lambda client: client.step("state", "text", 7))).state == ("state", "text", 7, ())
    with pytest.raises(RolloutFailure, match="it raised"):
        run_at_once(scene(lambda client: client.step("raise", "text", 7)))
    with pytest.raises(RolloutFailure, match="its process ended over this response"):
        run_at_once(scene(lambda client: client.step("die", "text", 7)))


def test_an_environment_of_a_single_turn_is_not_asked_for_turns() -> None:
    async def scene() -> tuple[Any, Turn]:
        client = EnvironmentClient(Handle(), RolloutClock())  # without a process that could answer
        return await client.reset("p", {}), await client.step(None, "text", 7)

    state, turn = run_at_once(scene())
    assert state is None
    assert turn.done


def test_a_process_that_does_not_come_up_is_one_clear_error() -> None:
    text = "environment task: a process failed with RunError: reward function f is gone as it started"
    with pytest.raises(SamplingError, match=text):
        scores(Handle(FakeProcess(comes_up=False)), ("a",))
    with pytest.raises(SamplingError, match=text):  # in the place of another
        scores(Handle(FakeProcess(), spares=(FakeProcess(comes_up=False),)), ("a", "die"), ("b",))


class Fickle(Environment):
    """Ranks the responses of a call, and fails the first time."""

    def __init__(self, failures: int = 1, result: Callable[[int], Any] | None = None) -> None:
        self.sizes: list[int] = []
        self._failures, self._result = failures, result

    def score(self, requests: list[EnvironmentRequest]) -> Any:
        self.sizes.append(len(requests))
        if len(self.sizes) <= self._failures:
            raise KeyError("gold")
        if self._result is not None:
            return self._result(len(requests))
        order = sorted(request.response for request in requests)
        return [EnvironmentReturn(reward=float(order.index(request.response)), correct=None) for request in requests]


class ProcessHere(FakeProcess):
    """Runs the calls on a worker of this process."""

    def __init__(self, environment: Environment) -> None:
        super().__init__()
        worker: Any = EnvironmentWorker.__new__(EnvironmentWorker)
        worker._name, worker._environment = "task", environment
        self._worker = worker

    async def _run(self, packed: Any) -> Any:
        method, arguments = pickle.loads(pickle.dumps(packed))
        return method(self._worker, *arguments)


def score_here(environment: Fickle, *responses: str) -> tuple[list[Any], list[str]]:
    async def scene() -> tuple[list[Any], list[str]]:
        client = EnvironmentClient(Handle(ProcessHere(environment)), RolloutClock())
        await client.start()
        return await client.score(job(*responses)), client.remarks

    return run_at_once(scene())


def test_a_group_whose_scoring_fails_is_scored_again_as_a_group() -> None:
    environment = Fickle()
    results, remarks = score_here(environment, "c", "a", "b")
    assert ([result.reward for result in results], environment.sizes) == ([2.0, 0.0, 1.0], [3, 3])
    assert [result.retries for result in results] == [1, 0, 0]
    (remark,) = remarks
    assert re.fullmatch(
        r"environment task: KeyError: 'gold' \(test_environment_client\.py:\d+\); the 3 responses are scored again, .*",
        remark,
    )


def test_a_group_that_fails_twice_fails_as_a_whole_if_none_of_its_responses_is_to_blame() -> None:
    environment = Fickle(failures=2)
    results, _ = score_here(environment, "c", "a", "b")
    assert len(set(results)) == 1
    assert "KeyError: 'gold'" in results[0]
    assert environment.sizes == [3, 3, 1, 1, 1], "rewards of responses by themselves are never taken"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda count: [EnvironmentReturn(1.0, None)] * (count - 1), "Fickle.score returned 2 scores for 3 responses"),
        (lambda count: [EnvironmentReturn(1.0, None)] * (count + 1), "Fickle.score returned 4 scores for 3 responses"),
        (lambda count: None, "Fickle.score returned NoneType for 3 responses, not a list of scores"),
        (lambda count: [1.0] * count, "Fickle.score returned float, not EnvironmentReturn; 3 are expected"),
        (lambda count: [EnvironmentReturn(float("nan"), None)] * count, "Fickle.score returned the reward nan"),
    ],
)
def test_other_things_than_a_score_per_response_are_refused(result: Callable[[int], Any], text: str) -> None:
    results, _ = score_here(Fickle(failures=0, result=result), "c", "a", "b")
    assert [line.startswith(f"environment task: {text}") for line in results] == [True] * 3


def open_client(*processes: FakeProcess, timeout_s: float = 0.3) -> EnvironmentClient:
    handle: Any = Handle(*processes)
    handle.config = EnvironmentConfig(timeout_s=timeout_s)
    return EnvironmentClient(handle, RolloutClock())


async def measure(call: Any) -> float:
    begin = asyncio.get_running_loop().time()
    await call
    return asyncio.get_running_loop().time() - begin


@pytest.mark.parametrize("bad", ["hang", "die"])
def test_calls_behind_one_that_loses_its_process_are_neither_late_nor_lost(bad: str) -> None:
    processes = [FakeProcess() for _ in range(3)]

    async def scene() -> tuple[list[float], list[Any]]:
        client = open_client(*processes)
        handle: Any = client._handle
        await client.start()
        broken = [asyncio.create_task(client.step(bad, "text", 7)) for _ in range(2)]
        waits = await asyncio.gather(*(measure(client.step(f"sound {number}", "text", 7)) for number in range(20)))
        failures = await asyncio.gather(*broken, return_exceptions=True)
        processes.extend(handle.spawned)
        return waits, failures

    waits, failures = run_at_once(scene())
    assert max(waits) < 0.25, "before the deadline of the calls that hang"
    assert [type(failure) for failure in failures] == [ResponseFailure] * 2
    calls = Counter(call for process in processes for call in process.calls)
    assert {calls[(f"sound {number}",)] for number in range(20)} == {1}, "none is repeated"


@pytest.mark.parametrize(("processes", "free"), [(2, 1), (4, 2), (5, 3)])
def test_repeated_calls_leave_half_of_the_processes_to_others(processes: int, free: int) -> None:
    fakes = [FakeProcess() for _ in range(processes)]

    async def scene() -> list[float]:
        client = open_client(*fakes)
        await client.start()
        repeated = [asyncio.create_task(client.step("hang", "text", 7, is_repeated=True)) for _ in range(8)]
        await asyncio.sleep(0.02)
        assert sum(not fake.calls for fake in fakes) == free
        waits = await asyncio.gather(*(measure(client.step("sound", "text", 7)) for _ in range(20)))
        for task in repeated:
            task.cancel()
        await asyncio.gather(*repeated, return_exceptions=True)
        return list(waits)

    assert max(run_at_once(scene())) < 0.2


def test_repeated_calls_are_answered_while_others_keep_coming() -> None:
    async def scene() -> Turn:
        client = open_client(FakeProcess(), FakeProcess())
        await client.start()

        async def keep_asking() -> None:
            while True:
                await client.step("sound", "text", 7)

        tasks = [asyncio.create_task(keep_asking()) for _ in range(8)]
        async with asyncio.timeout(2):
            turn = await client.step("again", "text", 7, is_repeated=True)
        for task in tasks:
            task.cancel()
        return turn

    assert run_at_once(scene()).state == ("again", "text", 7, ())


class SlowProcess(FakeProcess):
    """Takes 0.1 s for a call of a slow prompt, and 1 ms for others."""

    async def _run(self, packed: Any) -> Any:
        answer = await super()._run(packed)
        await asyncio.sleep(0.1 if self.calls[-1][0].startswith("slow") else 0.001)
        return answer


async def run_prompt(client: EnvironmentClient, name: str, samples: int) -> None:
    PROMPT_WORK.set(PromptWork())
    await asyncio.gather(*(client.step(f"{name} {number}", "text", 7) for number in range(samples)))
    await client.score(job(name))


def run_prompts(processes: list[SlowProcess], **samples: int) -> None:
    async def scene() -> None:
        client = open_client(*processes, timeout_s=60.0)
        await client.start()
        prompts = [asyncio.create_task(run_prompt(client, *prompt)) for prompt in samples.items()]
        await asyncio.gather(*prompts)

    run_at_once(scene())


def test_a_slow_prompt_before_others_does_not_hold_them_up() -> None:
    process = SlowProcess()
    run_prompts([process], slow=6, quick=5, late=1)
    order = [text for (text,) in process.calls]
    assert sorted(order[:8]) == ["late", "late 0", *(f"quick {number}" for number in range(5)), "slow 0"]
    assert order.index("quick") < order.index("slow 2"), "the score, which was asked for as slow 1 began"
    assert order[-5:] == [*(f"slow {number}" for number in range(2, 6)), "slow"]


def test_prompts_have_equal_shares_of_the_processes() -> None:
    processes = [SlowProcess() for _ in range(4)]
    run_prompts(processes, slow_a=4, slow_b=2, slow_c=3)
    first = [process.calls[0][0].partition(" ")[0] for process in processes]
    assert sorted(Counter(first).values()) == [1, 1, 2]
    assert sum(len(process.calls) for process in processes) == 4 + 2 + 3 + 3, "each once"


def test_calls_that_fail_or_are_given_up_leave_no_share_taken() -> None:
    async def scene() -> PromptWork:
        client = open_client(FakeProcess(), FakeProcess(), timeout_s=0.1)
        await client.start()
        work = PromptWork()
        PROMPT_WORK.set(work)
        calls = [asyncio.create_task(client.step(state, "text", 7)) for state in ("die", "hang", "raise", "x", "y")]
        await asyncio.sleep(0)
        calls[3].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return work

    work = run_at_once(scene())
    assert work.calls == 0
    assert work.seconds > 0.09, "with the call that hung"


@pytest.mark.parametrize("method", ["step", "score"])
def test_a_process_does_not_stay_with_a_call_that_was_given_up(method: str, killed: list[FakeProcess]) -> None:
    process = FakeProcess()

    async def scene() -> tuple[float, list[str]]:
        client = open_client(process, timeout_s=60.0)
        await client.start()
        call = client.step("hang", "text", 7) if method == "step" else client.score(job("hang"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call
        return await measure(client.step("sound", "text", 7)), client.remarks

    wait, remarks = run_at_once(scene())
    assert wait < 1
    assert killed == [process]
    (remark,) = remarks
    assert remark.endswith("worked for a rollout that is over; another process takes its place")
