"""How many GPUs there are: on this machine, and on those of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.run_schema import ClusterConfig


def visible_gpus() -> int:
    """CUDA devices of this machine as the driver's device files show them, within CUDA_VISIBLE_DEVICES."""
    devices = len([file for file in Path("/dev").glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return devices
    return min(devices, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def find_gpus(cluster: ClusterConfig) -> None:
    """Set cluster.gpus_per_node where it was left open: to what this machine has.

    It stays open on a machine without GPUs that joins a Ray cluster, whose machines may have some.
    """
    if cluster.gpus_per_node is None and (cluster.ray_address is None or visible_gpus()):
        cluster.gpus_per_node = visible_gpus()


def too_few(cluster: ClusterConfig, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with the machines of a Ray cluster; None: enough of them have enough GPUs.

    Args:
        cluster: how many machines are asked for, and how many GPUs on each.
        nodes: what ray.nodes() says of them.
    """
    found = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]), reverse=True)
    if sum(count >= cluster.gpus for count in found) >= cluster.num_nodes:
        return None
    return (
        f"cluster.gpus_per_node={cluster.gpus} on cluster.num_nodes={cluster.num_nodes}: the Ray cluster has "
        f"{len(found)} machine(s), with {', '.join(map(str, found))} GPUs; give what they have, or start Ray on more"
    )
