"""Where this node's sockets are. Imports no torch: processes that only ask and score do without its seconds."""

from __future__ import annotations

import os

import ray

from megatron_grpo.cluster.machines import LOCAL_MARKER


def node_address() -> str:
    """The address at which this node's sockets are reached by the run's other processes: loopback if all are here."""
    if LOCAL_MARKER in os.environ:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())
