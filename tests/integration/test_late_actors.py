"""Ray's actors, doors and GPUs: late or dead actors, strangers that stay outside, and GPUs that are shared."""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from megatron_grpo.cluster.cleanup import cleanup_after_kill
from megatron_grpo.cluster.futures import gather
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log, build_log_path, driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster, list_assigned_gpus
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ClusterConfig
from tests.support.programs import read_programs

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


PROGRAM = read_programs("late_actors")["program"]


def test_ray_is_reached_by_the_user_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    listening, modes, left, path, folder = json.loads(done.stdout.splitlines()[-1])
    assert listening == []
    assert 0 in modes.values(), "one of the folders around the session is the user's alone"
    assert left == []
    assert path.index(folder) > path.index(os.path.dirname(os.__file__)), "the standard library's come first"


class Process:
    """What a rank or an engine would find."""

    def gpus(self) -> list[str]:
        return list_assigned_gpus()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    ray.init(num_cpus=16, num_gpus=5, include_dashboard=False, log_to_driver=False)
    yield RayCluster(ClusterConfig(gpus_per_node=5, startup_timeout_s=30.0))
    ray.shutdown()


def test_engines_see_their_own_gpus_first_and_then_those_of_the_others(cluster: RayCluster) -> None:
    actor: Any = ray.remote(Process)
    cluster.reserve_shared(ranks=4, guests=[0, 2, 0, 1])
    ranks = [actor.options(**cluster.build_policy_options(rank)).remote() for rank in range(4)]
    devices = [device for found in ray.get([rank.gpus.remote() for rank in ranks], timeout=60) for device in found]
    assert len(set(devices)) == 4, "each rank has one of its own"
    cluster.share(devices, ranks_per_engine=2)
    engines = [actor.options(**cluster.build_engine_options(engine)).remote() for engine in range(2)]
    values = [actor.options(**cluster.build_value_options(rank)).remote() for rank in range(2)]
    assert ray.get([engine.visible.remote() for engine in engines], timeout=60) == [
        ",".join(devices),
        ",".join([*devices[2:], *devices[:2]]),
    ]
    assert ray.get([value.visible.remote() for value in values], timeout=60) == devices[:2]
    assert ray.get([value.gpus.remote() for value in values], timeout=60) == [[device] for device in devices[:2]]


@pytest.fixture
def two_nodes() -> Iterator[RayCluster]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 4})
    nodes.add_node(num_cpus=8, num_gpus=4)
    ray.init(address=nodes.address, log_to_driver=False)
    yield RayCluster(ClusterConfig(gpus_per_node=4, num_nodes=2, startup_timeout_s=60.0))
    ray.shutdown()
    nodes.shutdown()


def test_on_several_nodes_an_engine_has_gpus_of_its_ranks_node(two_nodes: RayCluster) -> None:
    actor: Any = ray.remote(Process)
    two_nodes.reserve_shared(ranks=8, guests=[0, 2, 4, 6])
    ranks = [actor.options(**two_nodes.build_policy_options(rank)).remote() for rank in range(8)]
    devices = [device for found in ray.get([rank.gpus.remote() for rank in ranks], timeout=60) for device in found]
    assert sorted(devices[:4]) == sorted(devices[4:]) == ["0", "1", "2", "3"]
    two_nodes.share(devices, ranks_per_engine=2)
    engines = [actor.options(**two_nodes.build_engine_options(engine)).remote() for engine in range(4)]
    places = ray.get([process.node.remote() for process in (*ranks, *engines)], timeout=60)
    assert places[0] != places[4]
    assert [places[8 + engine] for engine in range(4)] == [places[2 * engine] for engine in range(4)]
    visible = [text.split(",") for text in ray.get([engine.visible.remote() for engine in engines], timeout=60)]
    assert [gpus[:2] for gpus in visible] == [devices[2 * engine : 2 * engine + 2] for engine in range(4)]
    assert all(sorted(gpus) == ["0", "1", "2", "3"] for gpus in visible)
