"""Engines that follow the nodes of a Ray cluster, which is told of GPUs that nobody uses."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

from megatron_grpo.algorithms.elastic import EngineResizer
from megatron_grpo.cluster.engine_nodes import read_nodes
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import ClusterConfig
from tests.unit.algorithms.test_elastic import Parts

PREEMPTION = 2  # Ray's number of this reason to drain a node
HEAD = {"num_cpus": 8, "include_dashboard": False}
WAIT_S = 60.0


class Process:
    """What an engine would find."""

    def find_node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


class PlacedParts(Parts):
    """Parts of a run whose engines are actors with the GPUs of engines."""

    def __init__(self, cluster: RayCluster) -> None:
        super().__init__()
        self._cluster, self.actors = cluster, dict[int, Any]()
        self.start(0)

    def start(self, number: int) -> None:
        """Start an engine, or one in its place."""
        actor: Any = ray.remote(Process).options(**self._cluster.build_engine_options(number)).remote()
        self.actors[number] = actor
        node = ray.get(actor.find_node.remote(), timeout=WAIT_S)
        self.starts[number] = SimpleNamespace(processes=SimpleNamespace(node=node))

    def begin_add(self) -> int:
        number = super().begin_add()
        self.start(number)
        self.outcomes[number] = None
        return number

    @staticmethod
    def make_start() -> Any:
        return None

    def take_added(self) -> Iterator[tuple[int, str | None]]:
        starts = {number: self.starts[number] for number in self.added}
        for outcome in super().take_added():
            self.starts |= starts
            yield outcome

    def remove(self, number: int) -> None:
        super().remove(number)
        ray.kill(self.actors.pop(number))

    def node(self, number: int) -> str:
        return str(self.starts[number].processes.node)


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args={**HEAD, "num_gpus": 2})
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def join(nodes: Cluster, gpus: int) -> RayCluster:
    config = ClusterConfig(gpus_per_node=gpus, ray_address=nodes.address, startup_timeout_s=WAIT_S)
    cluster = RayCluster(config)
    cluster.start()
    cluster.reserve(None, GenerationParallelConfig(tensor=2), None)
    return cluster


def drain(nodes: Cluster, node: str, seconds: float) -> None:
    accepted, reason = GcsClient(address=nodes.address).drain_node(
        node, PREEMPTION, "a test", int((time.time() + seconds) * 1000)
    )
    assert accepted, reason
    wait_for(lambda: any(row.id == node and row.drains_until for row in read_nodes()))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("gpus", [2, 0], ids=["gpus", "cpus"])
def test_engines_follow_the_nodes(gpus: int, nodes: Cluster, tmp_path: Path) -> None:
    cluster, notes = join(nodes, gpus), list[str]()
    parts: Any = PlacedParts(cluster)
    resizer = EngineResizer(parts, parts, parts, cluster, tmp_path, drain_notice_s=60.0, note=notes.append)
    resizer.resize(1)
    assert list(parts.engines) == [0]
    # The second engine of this node has no room, and on CPUs each node gets one.
    node = nodes.add_node(num_cpus=8, num_gpus=3).node_id
    nodes.wait_for_nodes()
    wait_for(lambda: any(row.id == node and row.free for row in read_nodes()))
    resizer.resize(2)
    resizer.resize(3)
    assert list(parts.engines) == [0, 1]
    assert parts.node(0) == nodes.head_node.node_id
    assert parts.node(1) == node
    assert notes[-1] == "generation engine 1 serves version 2 of the weights"
    parts.unfinished[1] = 3
    drain(nodes, node, 1000.0)
    resizer.resize(4)
    assert parts.leaving == {1}
    assert "1 hands back" not in parts.log, "it has longer than a rollout takes"
    assert cluster.take_places(read_nodes()) == []
    parts.unfinished.clear()
    resizer.resize(5)
    assert list(parts.engines) == [0]
    assert [note for note in notes if "leave" in note or "left" in note] == [
        f"generation engine 1 leaves node {nodes.head_node.node_ip_address}, which drains",
        "generation engine 1 has left the run",
    ]
    drain(nodes, nodes.head_node.node_id, 30.0)
    resizer.resize(6)
    assert list(parts.engines) == [0]
    assert not parts.leaving, "it is the last engine"


@pytest.mark.parametrize("is_lost", [False, True], ids=["drains", "is gone"])
@pytest.mark.parametrize("gpus", [2, 0], ids=["gpus", "cpus"])
def test_an_engine_is_replaced_elsewhere(gpus: int, is_lost: bool, nodes: Cluster) -> None:
    cluster = join(nodes, gpus)
    first, second = [nodes.add_node(num_cpus=8, num_gpus=2) for _ in range(2)]
    nodes.wait_for_nodes()
    wait_for(lambda: sum(bool(node.free) for node in read_nodes()) == 3)
    assert sorted(cluster.take_places(read_nodes())) == sorted([(first.node_id,), (second.node_id,)])
    parts = PlacedParts(cluster)
    cluster.reserve_engine(1, (first.node_id,))
    parts.start(1)
    assert parts.node(1) == first.node_id
    if is_lost:
        nodes.remove_node(first, allow_graceful=False)
        wait_for(lambda: first.node_id not in {node.id for node in read_nodes()})
    else:
        drain(nodes, first.node_id, 1000.0)
        ray.kill(parts.actors[1])
    parts.start(1)
    if gpus:
        assert parts.node(1) == second.node_id, "the only node with free GPUs"
    assert parts.node(1) != first.node_id
