"""Actors of a real Ray that are late or die: what the driver is told of them."""

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megatron_grpo.cluster.cleanup import cleanup_after_kill
from megatron_grpo.cluster.futures import gather
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log, build_log_path, driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ClusterConfig

NAME = "policy rank {}".format


class Rank:
    """As much of a rank as waiting for it takes."""

    def __init__(self, rank: int) -> None:
        begin_process_log(NAME(rank))

    def pid(self) -> int:
        return os.getpid()

    @phase("train")
    def train(self, seconds: float, with_the_interpreter: bool = False) -> float:
        print("training")
        if with_the_interpreter:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        else:
            time.sleep(seconds)
        return seconds

    @phase("crash")
    def crash(self) -> None:
        ctypes.string_at(0)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the logs, with a Ray beneath this process whose workers log there."""
    cluster = RayCluster(ClusterConfig())
    with cleanup_after_kill(), driver_log(tmp_path_factory.mktemp("run"), "info") as folder:
        cluster.start()
        yield folder
        cluster.shutdown()


@pytest.fixture
def ranks(logs: Path) -> Iterator[list[Any]]:
    """Two ranks."""
    ranks = [ray.remote(num_cpus=0)(Rank).remote(rank) for rank in range(2)]
    ray.get([rank.pid.remote() for rank in ranks], timeout=120)
    yield ranks
    for rank in ranks:
        ray.kill(rank)


def test_a_stopped_actor_is_named_with_its_phase(ranks: list[Any], logs: Path) -> None:
    pid = ray.get(ranks[1].pid.remote())
    calls = [rank.train.remote(60.0) for rank in ranks]
    time.sleep(1.0)
    psutil.Process(pid).suspend()
    with pytest.raises(RunError) as raised:
        gather(calls, deadline_s=3.0, phase_name="training step", name=NAME)
    message = str(raised.value)
    assert message.startswith(
        "training step: no answer from policy rank 0, policy rank 1 within 3 s; policy rank 1 (pid "
    )
    assert f"policy rank 1 (pid {pid} on " in message
    assert ") is in phase 'train', entered " in message
    assert ": its process is stopped (SIGSTOP); policy rank 0 (pid " in message
    assert "in train" in build_log_path(logs, NAME(0)).read_text(), "its stacks"
    assert "training\n" in build_log_path(logs, NAME(0)).read_text(), "what it prints"
    psutil.Process(pid).kill()


@pytest.mark.slow
def test_an_actor_that_holds_its_interpreter_writes_its_stacks(ranks: list[Any], logs: Path) -> None:
    before = build_log_path(logs, NAME(0)).stat().st_size
    call = ranks[0].train.remote(12.0, with_the_interpreter=True)
    with pytest.raises(RunError) as raised:
        gather([call], deadline_s=8.0, phase_name="training step", name=NAME)
    assert ": its interpreter does not respond; stacks are in " in str(raised.value)
    with build_log_path(logs, NAME(0)).open() as log:
        log.seek(before)
        assert "in train" in log.read()


def test_an_actor_that_crashes_is_told_with_its_phase(ranks: list[Any], logs: Path) -> None:
    with pytest.raises(RunError) as raised:
        gather([ranks[1].crash.remote()], deadline_s=60.0, phase_name="training step", name=lambda _: NAME(1))
    message = str(raised.value)
    assert message.startswith("training step: policy rank 1 died (its process is gone); policy rank 1 (pid ")
    assert "is in phase 'crash', entered " in message
    log = build_log_path(logs, NAME(1)).read_text()
    assert "Segmentation fault" in log
    assert "in crash" in log
