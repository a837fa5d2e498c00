"""The machines of a run, before Ray is imported."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_grpo.config.run_schema import ADDRESS_VARIABLE, ClusterConfig


def count_visible_gpus() -> int:
    """Count this machine's GPUs within CUDA_VISIBLE_DEVICES, by device files."""
    devices = len([file for file in Path("/dev").glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


LOCAL = "local"  # value of ADDRESS_VARIABLE with which the driver starts its own Ray


def read_environment_address() -> str | None:
    """Read the address of a Ray cluster from the environment."""
    address = os.environ.get(ADDRESS_VARIABLE, "").strip()
    return None if address in ("", LOCAL) else address


def fill_in_address(cluster: ClusterConfig) -> None:
    """Set cluster.ray_address to the address in the environment, if None."""
    if cluster.ray_address is None:
        cluster.ray_address = read_environment_address()


def explain_origin(address: str) -> str:
    """Say, for the end of a message, if the address comes from the environment."""
    if address != read_environment_address():
        return ""
    return f"; the address is {ADDRESS_VARIABLE} of the environment: unset it to start Ray on this machine"


def fill_in_gpus(cluster: ClusterConfig) -> None:
    """Set cluster.gpus_per_node to this machine's GPUs, if None."""
    # A machine without GPUs may join a cluster whose machines have some.
    if cluster.gpus_per_node is None and (cluster.ray_address is None or count_visible_gpus()):
        cluster.gpus_per_node = count_visible_gpus()


# Label of Ray's nodes that are for training alone, or for engines alone, and its values.
ROLE_LABEL, TRAINING_ROLE, GENERATION_ROLE = "megatron-grpo-role", "training", "generation"


def list_roles(nodes: Sequence[Mapping[str, Any]]) -> set[str]:
    """List the roles that living nodes have; empty: each may have every process."""
    labels = [node.get("Labels", {}) for node in nodes if node["Alive"]]
    return {label[ROLE_LABEL] for label in labels if ROLE_LABEL in label}


def check_machines(cluster: ClusterConfig, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return an error message if machines or GPUs are missing."""
    counts = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]), reverse=True)
    if sum(count >= cluster.gpus for count in counts) >= cluster.num_nodes:
        return None
    return (
        f"cluster.gpus_per_node={cluster.gpus} on cluster.num_nodes={cluster.num_nodes}: the Ray cluster has "
        f"{len(counts)} machine(s), with {', '.join(map(str, counts))} GPUs; set both keys to what it has, or start "
        "Ray on more machines"
    )


AUTO = "auto"  # address of the cluster that Ray finds on this machine
PROBE_S = 5.0  # deadline in seconds for the connection, and again for the answer
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})")
# An HTTP/2 client, like gRPC, opens a connection with a line of text and a SETTINGS frame (RFC 9113, 3.4).
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER_BYTES, _FRAME_TYPE_AT, _SETTINGS = 9, 3, 4


def check_address(address: str) -> str | None:
    """Return an error message for an address of a wrong form."""
    match = _ADDRESS.fullmatch(address)
    if address == AUTO or (match and 0 < int(match["port"]) < 2**16):
        return None
    return "is not an address; give HOST:PORT, or auto for the cluster on this machine, or null to start one here"


def check_reachable(address: str, timeout_s: float = PROBE_S) -> str | None:
    """Return the reason why no Ray head answers at an address."""
    match = _ADDRESS.fullmatch(address)
    # Only Ray itself can tell about an address that is not HOST:PORT, or with TLS.
    if match is None or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    try:
        with socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_HTTP2_PREFACE)
            answer = b""
            while len(answer) < _FRAME_HEADER_BYTES and (piece := connection.recv(_FRAME_HEADER_BYTES - len(answer))):
                answer += piece
    except TimeoutError:
        return f"nothing answers within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    if len(answer) < _FRAME_HEADER_BYTES or answer[_FRAME_TYPE_AT] != _SETTINGS:
        return "something other than Ray answers there"
    return None


# Environment variable of the processes of a run that starts Ray itself, all on this machine.
LOCAL_MARKER = "MEGATRON_GRPO_LOCAL"
RAY_SETTINGS = {
    LOCAL_MARKER: "1",
    # Network interface and address of the process groups of policy ranks and of vLLM.
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # With 0 Ray's servers listen on loopback only, as by default on Windows and macOS, not on every address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray overwrites CUDA_VISIBLE_DEVICES of processes that request no GPU; our processes choose GPUs themselves.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Otherwise nodes drain for half a minute after all processes of the run have ended.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Ray's default niceness gives way to all other processes of the machine, which starves a run on a laptop.
    "RAY_worker_niceness": "0",
}


# Each client of torch's TCPStore asks DNS for the name of its address. Where a resolver drops bursts of
# questions, some of 128 clients that come at once wait 10 s or more; with these options 512 are there within 2 s.
_RESOLVER = "timeout:1 attempts:1"


def prepare_network(address: str) -> None:
    """Set a process's name lookups and gloo's interface, where unset.

    `address`: that of this node. Gloo would take the interface of the host's name, which at many sites is loopback.
    """
    os.environ.setdefault("RES_OPTIONS", _RESOLVER)
    interface = find_interface(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def find_interface(address: str) -> str | None:
    """Find the network interface that has an address; None: none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def prepare_ray_environment() -> None:
    """Set `RAY_SETTINGS` and a token in the environment."""
    if "ray" in sys.modules:  # too late: Ray reads them when it is imported
        return
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray's servers run code for their clients, who may be other users of this machine. So a Ray that is started here
    # accepts only clients with a token drawn for this run.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
