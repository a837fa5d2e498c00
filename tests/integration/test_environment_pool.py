"""Environments as Ray actors: order, splitting over workers, deadlines and death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig
from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.registry import EnvironmentPool, EnvironmentWorker, build_environments


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cluster = RayCluster(ClusterConfig())
    cluster.start()
    yield
    cluster.shutdown()


def request(response: str, answer: str = "025") -> EnvironmentRequest:
    info = {REFERENCE: answer}
    return EnvironmentRequest(prompt="12+13=", response=response, stop_reason="stop", extra_env_info=info)


def test_scores_come_in_the_order_of_the_requests_from_any_number_of_workers() -> None:
    pools = build_environments({"addition": EnvironmentConfig(type="addition", num_workers=3)})
    pool = pools["addition"]
    for count in (0, 1, 2, 7):
        right = [i % 3 == 0 for i in range(count)]
        results = pool.step([request("025" if is_right else "026") for is_right in right])
        assert [result.correct for result in results] == right
        assert [result.reward for result in results] == [float(is_right) for is_right in right]
    pool.shutdown()
    pool.shutdown()


def test_the_math_environment_works_and_keeps_its_time_limit_inside_an_actor() -> None:
    pool = EnvironmentPool("math", EnvironmentConfig(type="math"))
    results = pool.step([request("\\boxed{\\frac{50}{2}}", "25"), request("\\boxed{9^{9^{9^{9}}}}", "25")])
    assert [result.correct for result in results] == [True, False]
    pool.shutdown()


def test_a_dead_worker_is_one_clear_error() -> None:
    pool = EnvironmentPool("addition", EnvironmentConfig(type="addition"))
    pool.step([request("025")])
    pid = ray.get(pool._workers[0].__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError, match="environment addition: worker 0 died"):
        pool.step([request("025")])
    pool.shutdown()


def test_a_deadline_that_passes_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = EnvironmentPool("addition", EnvironmentConfig(type="addition", timeout_s=1.0))
    busy = pool._workers[0].__ray_call__.remote(lambda _: time.sleep(30))
    with pytest.raises(RunError, match=r"environment addition: no answer from worker 0 within 1 s"):
        pool.step([request("025")])
    del busy
    pool.shutdown()


def test_a_request_without_an_answer_names_the_worker_and_the_cause() -> None:
    pool = EnvironmentPool("addition", EnvironmentConfig(type="addition"))
    bad = EnvironmentRequest(prompt="", response="1", stop_reason="stop", extra_env_info={})
    with pytest.raises(RunError, match="worker 0 failed with KeyError: '<reference>'"):
        pool.step([bad])
    pool.shutdown()


def test_the_worker_takes_columns() -> None:
    columns = (("12+13=",) * 2, ("025", "026"), ("stop", "stop"), ({REFERENCE: "025"},) * 2)
    expected = ((1.0, 0.0), (True, False), ({}, {}))
    assert EnvironmentWorker("environment worker", EnvironmentConfig(type="addition")).step(columns) == expected
