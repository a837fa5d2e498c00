"""Who is shown which GPU when all share those of the policy: Ray is told of GPUs that nobody uses."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from megatron_grpo.cluster.ray_cluster import RayCluster, list_assigned_gpus
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import ClusterConfig


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
    ray.init(address="local", num_cpus=16, num_gpus=5, include_dashboard=False, log_to_driver=False)
    yield RayCluster(ClusterConfig(gpus_per_node=5, startup_timeout_s=30.0))
    ray.shutdown()


def test_engines_see_their_own_gpus_first_and_then_those_of_the_others(cluster: RayCluster) -> None:
    actor: Any = ray.remote(Process)
    cluster.reserve_shared(ranks=4, guests=[0, 2, 0, 1])
    ranks = [actor.options(**cluster.build_policy_options(rank)).remote() for rank in range(4)]
    devices = [device for gpus in ray.get([rank.gpus.remote() for rank in ranks], timeout=60) for device in gpus]
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
    devices = [device for gpus in ray.get([rank.gpus.remote() for rank in ranks], timeout=60) for device in gpus]
    assert sorted(devices[:4]) == sorted(devices[4:]) == ["0", "1", "2", "3"]
    two_nodes.share(devices, ranks_per_engine=2)
    engines = [actor.options(**two_nodes.build_engine_options(engine)).remote() for engine in range(4)]
    nodes = ray.get([process.node.remote() for process in (*ranks, *engines)], timeout=60)
    assert nodes[0] != nodes[4]
    assert [nodes[8 + engine] for engine in range(4)] == [nodes[2 * engine] for engine in range(4)]
    visible = [text.split(",") for text in ray.get([engine.visible.remote() for engine in engines], timeout=60)]
    assert [gpus[:2] for gpus in visible] == [devices[2 * engine : 2 * engine + 2] for engine in range(4)]
    assert all(sorted(gpus) == ["0", "1", "2", "3"] for gpus in visible)


def test_an_engine_that_leaves_makes_room_for_one_that_waits(cluster: RayCluster) -> None:
    cluster.reserve(None, GenerationParallelConfig(tensor=2, data=2), None)
    cluster.reserve_engine(2)
    actor = ray.remote(Process).options(**cluster.build_engine_options(2)).remote()
    assert cluster.explain_lack(1) is None
    assert cluster.explain_lack(2) == "it needs 2 GPUs on nodes for engines, and 1 of the cluster are free"
    cluster.release_engine(0)
    assert len(ray.get(actor.gpus.remote(), timeout=60)) == 2
    assert cluster.explain_lack(2) is None
