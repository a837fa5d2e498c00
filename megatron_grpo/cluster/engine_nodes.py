"""Ray's nodes as places for engines: those that join a run, and those that drain."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node, state

from megatron_grpo.cluster.machines import ROLE_LABEL

NODE_LABEL = "ray.io/node-id"  # Ray's own label of each node, with the node's id


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the Ray cluster.

    Example: Node("f00d", "10.0.0.3", free={"GPU": 8.0, "CPU": 96.0})
    """

    id: str
    address: str
    role: str | None = None  # value of ROLE_LABEL
    free: Mapping[str, float] | None = None  # resources that nobody has reserved; None: Ray does not tell yet
    drains_until: float | None = None  # seconds since the epoch, inf without a deadline; None: it does not drain

    def is_gone_before(self, end: float) -> bool:
        """True if the node may be gone at a time (epoch)."""
        return self.drains_until is not None and self.drains_until < end


def read_nodes() -> list[Node]:
    """Read the living nodes, in the order of their ids."""
    free, draining = available_resources_per_node(), state.get_draining_nodes()
    # Ray's deadlines are in milliseconds, and 0 means that there is none.
    ends = {node: milliseconds / 1000 or math.inf for node, milliseconds in draining.items()}
    nodes = [
        Node(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            role=node.get("Labels", {}).get(ROLE_LABEL),
            free=free.get(node["NodeID"]),
            drains_until=ends.get(node["NodeID"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.id)


def find_places(nodes: Sequence[Node], bundles: Sequence[Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Find room for engines on nodes; the nodes of each engine.

    `bundles`: equal ones, of one engine; empty: it reserves nothing, and each node has room for one.
    """
    slots = [node.id for node in nodes for _ in range(_count_bundles(node, bundles[0] if bundles else {}))]
    size = max(len(bundles), 1)
    return [tuple(dict.fromkeys(slots[begin : begin + size])) for begin in range(0, len(slots) - size + 1, size)]


def _count_bundles(node: Node, bundle: Mapping[str, float]) -> int:
    if node.free is None or node.drains_until is not None:
        return 0
    free = node.free
    return min((int(free.get(resource, 0) // amount) for resource, amount in bundle.items()), default=1)


def find_leaving(nodes: Sequence[Node], hosts: Mapping[int, Collection[str]]) -> dict[int, Node]:
    """Find engines on draining nodes, each with its node; one engine always stays.

    `hosts`: ids of the nodes of each engine that serves.
    """
    draining = {node.id: node for node in nodes if node.drains_until is not None}
    leaving = {}
    for number, ids in hosts.items():
        if ends := [draining[host] for host in ids if host in draining]:
            leaving[number] = min(ends, key=_get_end)
    if len(leaving) == len(hosts) and leaving:
        del leaving[max(leaving, key=lambda number: _get_end(leaving[number]))]
    return leaving


def _get_end(node: Node) -> float:
    return math.inf if node.drains_until is None else node.drains_until
