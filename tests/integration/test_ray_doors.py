"""A Ray that a run starts: other machines do not reach it, and other users of this one do not enter its folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import ipaddress, json, os, sys
from megatron_grpo.cluster.machines import prepare_ray_environment

prepare_ray_environment()
import psutil
from megatron_grpo.cluster.ray_cluster import RayCluster, find_node_address
from megatron_grpo.config.run_schema import ClusterConfig
import ray

cluster = RayCluster(ClusterConfig(gpus_per_node=0))
cluster.start()


@ray.remote
def import_path():
    import megatron_grpo
    return sys.path


path = ray.get(import_path.remote())
own = psutil.Process()
listening = {
    f"{process.name()} {socket.laddr.ip}"
    for process in [own, *own.children(recursive=True)]
    for socket in process.net_connections()
    if socket.status == psutil.CONN_LISTEN
    and not ipaddress.ip_address(socket.laddr.ip.removeprefix("::ffff:")).is_loopback
}
session = os.path.realpath(ray._private.worker._global_node.get_session_dir_path())
modes = {}
while session != "/":
    modes[session] = os.stat(session).st_mode & 0o077
    session = os.path.dirname(session)
cluster.shutdown()
left = [folder for folder in modes if "ray_" in folder and os.path.exists(folder)]
print(json.dumps([sorted(listening), modes, left, path, os.getcwd()]))
"""


def test_ray_is_reached_by_the_user_alone(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    listening, modes, remaining_files, path, folder = json.loads(process.stdout.splitlines()[-1])
    assert listening == []
    assert 0 in modes.values(), "one of the folders around the session is the user's alone"
    assert remaining_files == []
    assert path.index(folder) > path.index(os.path.dirname(os.__file__)), "the standard library's come first"
