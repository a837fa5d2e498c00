"""Which engines come and go with the nodes of a Ray cluster: decisions, from what Ray says of its nodes."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from megatron_grpo.cluster import engine_nodes
from megatron_grpo.cluster.engine_nodes import Node, find_leaving, find_places, read_nodes
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.schema import ClusterConfig

TWO_GPUS = [{"GPU": 2.0, "CPU": 1.0}]
SPREAD = [{"GPU": 1.0, "CPU": 1.0}] * 6
"""An engine of six GPUs on nodes of four."""


def make_node(name: str, gpus: float, cpus: float = 64.0) -> Node:
    return Node(name, f"address of {name}", free={"GPU": gpus, "CPU": cpus})


@pytest.mark.parametrize(
    ("nodes", "bundles", "engines"),
    [
        ([make_node("a", 4.0)], TWO_GPUS, [("a",), ("a",)]),
        ([make_node("a", 3.0), make_node("b", 2.0)], TWO_GPUS, [("a",), ("b",)]),
        ([make_node("a", 1.0), make_node("b", 1.0)], TWO_GPUS, []),
        ([make_node("a", 8.0, cpus=3.0)], TWO_GPUS, [("a",)] * 3),
        ([make_node("a", 4.0)], SPREAD, []),
        ([make_node("a", 4.0), make_node("b", 4.0)], SPREAD, [("a", "b")]),
        ([make_node("a", 4.0), make_node("b", 4.0), make_node("c", 4.0)], SPREAD, [("a", "b"), ("b", "c")]),
        ([make_node("a", 0.0), make_node("b", 0.0)], [], [("a",), ("b",)]),
        ([Node("a", "10.0.0.1")], [], []),
        ([Node("a", "10.0.0.1", free={"GPU": 8.0, "CPU": 8.0}, drains_until=math.inf)], TWO_GPUS, []),
    ],
    ids=[
        "two engines",
        "an engine is on one node",
        "too small",
        "cores limit",
        "half an engine",
        "two nodes an engine",
        "a node has parts of two engines",
        "on CPUs one each",
        "not told yet",
        "draining",
    ],
)
def test_engines_find_room_on_nodes(
    nodes: Sequence[Node], bundles: list[dict[str, float]], engines: list[tuple[str, ...]]
) -> None:
    assert find_places(nodes, bundles) == engines


STAYS = Node("stays", "10.0.0.1")
SOON, LATE = Node("soon", "10.0.0.2", drains_until=100.0), Node("late", "10.0.0.3", drains_until=math.inf)


@pytest.mark.parametrize(
    ("hosts", "leaving"),
    [
        ({0: ["stays"], 1: ["soon"], 2: ["late"]}, {1: SOON, 2: LATE}),
        ({0: ["stays"], 1: ["stays"]}, {}),
        ({0: ["stays"], 1: ["late", "soon", "stays"]}, {1: SOON}),
        ({0: ["soon"], 1: ["late"]}, {0: SOON}),
        ({0: ["late"], 1: ["soon"]}, {1: SOON}),
        ({0: ["soon"]}, {}),
        ({0: ["a node that is gone"], 1: ["late"]}, {1: LATE}),
        ({}, {}),
    ],
    ids=["two of three", "none drains", "spread", "longest stays", "order", "last", "a lost node", "no engine"],
)
def test_engines_leave_draining_nodes_and_one_stays(hosts: dict[int, list[str]], leaving: dict[int, Node]) -> None:
    assert find_leaving([STAYS, SOON, LATE], hosts) == leaving


def test_a_node_says_whether_it_may_be_gone() -> None:
    assert (STAYS.is_gone_before(1e9), LATE.is_gone_before(1e9)) == (False, False)
    assert (SOON.is_gone_before(100.0), SOON.is_gone_before(101.0)) == (False, True)


def test_nodes_are_read_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"NodeID": name, "NodeManagerAddress": f"10.0.0.{number}", "Alive": name != "dead", "Labels": labels}
        for number, (name, labels) in enumerate(
            [("dead", {}), ("new", {}), ("b", {"megatron-grpo-role": "generation"}), ("a", {})]
        )
    ]
    monkeypatch.setattr(engine_nodes, "ray", SimpleNamespace(nodes=lambda: rows))
    free = {"a": {"GPU": 1.0}, "b": {"GPU": 2.0}}
    monkeypatch.setattr(engine_nodes, "available_resources_per_node", lambda: free)
    draining = SimpleNamespace(get_draining_nodes=lambda: {"a": 0, "b": 2500})
    monkeypatch.setattr(engine_nodes, "state", draining)
    assert read_nodes() == [
        Node("a", "10.0.0.3", free={"GPU": 1.0}, drains_until=math.inf),
        Node("b", "10.0.0.2", role="generation", free={"GPU": 2.0}, drains_until=2.5),
        Node("new", "10.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("roles", "engines"),
    [(set(), [("engines",), ("none",)]), ({"training"}, [("engines",), ("none",)]), ({"generation"}, [("engines",)])],
    ids=str,
)
def test_engines_start_on_nodes_for_engines_once(roles: set[str], engines: list[tuple[str, ...]]) -> None:
    cluster = RayCluster(ClusterConfig(gpus_per_node=0))
    cluster._roles, cluster._settled_nodes = roles, {"first"}
    nodes = [
        Node("engines", "10.0.0.1", role="generation", free={}),
        Node("first", "10.0.0.2", free={}),
        Node("none", "10.0.0.3", free={}),
        Node("ranks", "10.0.0.4", role="training", free={}),
    ]
    assert cluster.take_places(nodes) == engines
    assert cluster.take_places(nodes) == []


def test_a_node_without_room_gets_an_engine_when_there_is_room() -> None:
    cluster = RayCluster(ClusterConfig(gpus_per_node=4))
    cluster._engine_bundles = TWO_GPUS
    assert cluster.take_places([make_node("a", 1.0)]) == []
    assert cluster.take_places([make_node("a", 2.0)]) == [("a",)]
    assert cluster.take_places([make_node("a", 2.0)]) == []
