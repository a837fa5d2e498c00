"""Environments in Ray actors: started, shared out, and what their processes answer."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import pytest
import ray

from megatron_grpo.cluster.cleanup import is_alive
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ScoreOrError
from megatron_grpo.environments.environment_processes import EnvironmentHandle, build_environments
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import Environment
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.environment_client import EnvironmentClient
from tests.integration.test_rollout_pool import cluster

__all__ = ["cluster"]  # a fixture of every test here


@contextmanager
def handles(config: EnvironmentConfig, shares: int = 1) -> Iterator[list[EnvironmentHandle]]:
    pool = build_environments({"task": config})["task"]
    try:
        yield pool.start(shares)
    finally:
        pool.shutdown()
        pool.shutdown()


@pytest.fixture(scope="module")
def shared(cluster: None) -> Iterator[list[EnvironmentHandle]]:
    """Three processes for two users, for tests that leave them as they were."""
    with handles(EnvironmentConfig(type="addition", num_workers=3), shares=2) as shared:
        yield shared


def job(*responses: str, answer: str = "025") -> list[EnvironmentRequest]:
    extra = {REFERENCE: answer}
    return [
        EnvironmentRequest(prompt="12+13=", response=response, stop_reason="stop", extra_env_info=extra)
        for response in responses
    ]


def score_jobs(handle: EnvironmentHandle, jobs: Sequence[list[EnvironmentRequest]]) -> list[list[ScoreOrError]]:
    async def scene() -> list[list[ScoreOrError]]:
        client = EnvironmentClient(handle, RolloutClock())
        await client.start()
        return await asyncio.gather(*(client.score(job) for job in jobs))

    return asyncio.run(scene())


@pytest.mark.parametrize("user", [0, 1])
def test_scores_come_in_the_order_of_the_responses_from_any_number_of_processes(
    user: int, shared: list[EnvironmentHandle]
) -> None:
    jobs = [job(*("025" if i % 3 == j % 3 else "026" for j in range(i))) for i in range(1, 8)]
    results = score_jobs(shared[user], jobs)
    for i, result in enumerate(results, start=1):
        assert result == [EnvironmentReturn(float(i % 3 == j % 3), i % 3 == j % 3) for j in range(i)]


def test_every_user_has_processes_of_its_own(shared: list[EnvironmentHandle]) -> None:
    check_shares(shared, [2, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "shares", "expected"), [(1, 3, [1, 1, 1]), (4, 1, [4])])
def test_processes_are_shared_out(workers: int, shares: int, expected: list[int]) -> None:
    with handles(EnvironmentConfig(type="addition", num_workers=workers), shares) as shared:
        check_shares(shared, expected)


def check_shares(shared: list[EnvironmentHandle], expected: list[int]) -> None:
    assert [len(handle.actors) for handle in shared] == expected
    actors = [actor for handle in shared for actor in handle.actors]
    pids = {status.pid for status in ray.get([actor.start.remote() for actor in actors])}
    assert len(pids) == sum(expected)


def test_the_math_environment_works_and_keeps_its_time_limit_inside_an_actor() -> None:
    with handles(EnvironmentConfig(type="math")) as (handle,):
        ((right, endless),) = score_jobs(handle, [job("\\boxed{\\frac{50}{2}}", "\\boxed{9^{9^{9^{9}}}}", answer="25")])
    assert right == EnvironmentReturn(1.0, True)
    assert endless == EnvironmentReturn(0.0, False)


def test_a_response_without_an_answer_names_the_environment_and_the_cause(shared: list[EnvironmentHandle]) -> None:
    nothing = [EnvironmentRequest(prompt="", response="1", stop_reason="stop", extra_env_info={})]
    ((message,),) = score_jobs(shared[1], [nothing])
    assert re.fullmatch(r"environment task: KeyError: '<reference>' \(tasks.py:\d+\)", str(message))


def test_a_process_can_be_made_in_the_place_of_another(shared: list[EnvironmentHandle]) -> None:
    spare = shared[0].spawn()
    ray.get(spare.start.remote())
    assert ray.get(spare.run.remote((EnvironmentWorker.score, (job("025"),)))) == [EnvironmentReturn(1.0, True)]
    ray.kill(spare)


class Starting(Environment):
    """An environment whose scoring leaves processes behind, in sessions of their own and deaf to SIGTERM."""

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        mark = requests[0].response
        subprocess.run(["sh", "-c", "setsid sh -c 'trap \"\" TERM HUP; sleep $0; :' $0 &", mark], check=True)
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        return [EnvironmentReturn(float(os.getpid()), None) for _ in requests]


@pytest.mark.parametrize("end", ["by a signal", "by Ray"])
def test_what_an_environment_started_ends_with_its_process(end: str) -> None:
    mark = f"1{os.getpid()}{time.monotonic_ns() % 10**6:06}"
    with handles(EnvironmentConfig(type=f"{__name__}:Starting")) as (handle,):
        ((score,),) = score_jobs(handle, [job(mark)])
        assert isinstance(score, EnvironmentReturn)
        pid = int(score.reward or 0)
        forked = psutil.Process(pid).children()
        assert forked
        assert find_marked(mark)
        if end == "by Ray":
            ray.kill(handle.actors[0])
        else:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (find_marked(mark) or any(map(is_alive, forked))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not find_marked(mark)
        assert not any(map(is_alive, forked))


def find_marked(mark: str) -> list[str]:
    return subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False).stdout.split()
