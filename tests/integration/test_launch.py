"""Runs that `launch` starts, for real: under Slurm with a preemption, on a Ray cluster, and in the background."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from megatron_grpo.cluster.machines import ROLE_LABEL
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.schema import ClusterConfig
from tests.support.slurm import NEEDS_SLURM, Slurm, free_port, start_slurm

# A busy machine has ten minutes for what takes one.
WAIT_S = 600
SHORT = ("+exp=quickstart", "policy.optimizer.warmup_steps=1", "grpo.val_at_start=false", "grpo.val_at_end=false")


def call_launch(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Standard output of a launch command that is called in a folder."""
    command = [sys.executable, "-m", "megatron_grpo.launch", *arguments]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def wait_until(is_so: Callable[[], object], event: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"{event} did not happen"
        time.sleep(0.2)


def read_steps(run_dir: Path) -> list[int]:
    """Steps that a run has recorded."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with start_slurm(folder, nodes=2) as slurm:
        yield slurm


class TestSlurm:
    pytestmark = NEEDS_SLURM

    @pytest.mark.slow
    @pytest.mark.timeout(3 * WAIT_S)
    def test_a_preempted_job_goes_on_without_a_lost_or_repeated_step(self, slurm: Slurm, tmp_path: Path) -> None:
        run_dir = tmp_path / "outputs" / "mine"
        nodes = ("cluster.num_nodes=2", "launch.generation_nodes=1", "launch.check_s=600")
        arguments = (*SHORT, *nodes, "grpo.max_num_steps=30", "run_dir=outputs/mine")
        printed = call_launch(tmp_path, "slurm", *arguments, env=slurm.env)
        job = printed.split()[2].rstrip(":")
        assert (run_dir / "launch" / "job.sbatch").read_text().startswith("#!/usr/bin/env bash")
        wait_until(lambda: len(read_steps(run_dir)) >= 3, "a third step")
        assert f"job {job}+0 is running" in call_launch(tmp_path, "status", "outputs/mine", env=slurm.env)
        slurm.call("scancel", "--signal=USR1", "--batch", job)
        wait_until(lambda: slurm.state(job) == "PENDING", "the requeue")
        saved = read_steps(run_dir)
        assert (run_dir / "checkpoints" / f"step_{saved[-1]}").is_dir()
        slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
        wait_until(lambda: (run_dir / "summary.json").exists() and len(read_steps(run_dir)) == 30, "the end")
        assert slurm.wait(job) == "COMPLETED"
        assert read_steps(run_dir) == list(range(1, 31))
        assert len((run_dir / "starts.jsonl").read_text().splitlines()) == 2
        assert "ended: completed" in call_launch(tmp_path, "status", "outputs/mine", env=slurm.env)

    def test_a_job_that_waits_is_cancelled(self, slurm: Slurm, tmp_path: Path) -> None:
        slurm.call("scontrol", "update", "partitionname=test", "state=down")
        printed = call_launch(tmp_path, "slurm", *SHORT, "launch.seeds=[3,5]", "run_dir=mine", env=slurm.env)
        job = printed.split()[2].rstrip(":")
        assert "is pending" in call_launch(tmp_path, "status", "mine", env=slurm.env)
        assert "what waits is cancelled" in call_launch(tmp_path, "stop", "mine", env=slurm.env)
        assert slurm.wait(job) == "CANCELLED"


@pytest.mark.slow
@pytest.mark.timeout(2 * WAIT_S)
def test_a_run_in_the_background_is_followed_and_stopped(tmp_path: Path) -> None:
    call_launch(tmp_path, "local", *SHORT, "run_dir=mine")
    run_dir = tmp_path / "mine"
    try:
        wait_until(lambda: len(read_steps(run_dir)) >= 2, "a second step")
        status = call_launch(tmp_path, "status", "mine")
        assert "is running" in status
        assert "of 400" in status
        assert "step 1/400" in call_launch(tmp_path, "logs", "mine", "--lines", "200")
        assert "policy rank 1" in call_launch(tmp_path, "logs", "mine", "--process", "policy.1")
    finally:
        stopped = call_launch(tmp_path, "stop", "mine")
    assert "will end after the step" in stopped
    wait_until(lambda: "has ended" in call_launch(tmp_path, "status", "mine"), "the end")
    assert (run_dir / "checkpoints" / f"step_{read_steps(run_dir)[-1]}").is_dir()


def add_node(cluster: Cluster, role: str) -> None:
    cluster.add_node(num_cpus=2, labels={ROLE_LABEL: role})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        add_node(cluster, "training")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@ray.remote
class Probe:
    """A process that says on which node it is."""

    def find_node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def find_labels(node_id: str) -> str | None:
    """Role of a node of the cluster."""
    (node,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
    role: str | None = node["Labels"].get(ROLE_LABEL)
    return role


@pytest.mark.slow
@pytest.mark.timeout(2 * WAIT_S)
def test_policy_and_engines_have_nodes_of_their_own_one_of_them_late(cluster: Cluster, tmp_path: Path) -> None:
    timer = threading.Timer(5, add_node, (cluster, "generation"))
    timer.start()
    began = time.monotonic()
    run_cluster = RayCluster(ClusterConfig(num_nodes=3, gpus_per_node=0, ray_address=cluster.address))
    run_cluster.start()
    assert time.monotonic() - began > 4, "the third node was waited for"
    timer.join()
    for options, role in (
        (run_cluster.build_policy_options(0), "training"),
        (run_cluster.build_engine_options(0), "generation"),
    ):
        assert find_labels(ray.get(Probe.options(**options).remote().find_node.remote())) == role
    address = f"http://{cluster.head_node.webui_url}"
    arguments = (*SHORT, "grpo.max_num_steps=2", "cluster.num_nodes=3", f"launch.ray.address={address}")
    call_launch(tmp_path, "ray", *arguments, "run_dir=mine")
    wait_until(lambda: "running" not in call_launch(tmp_path, "status", "mine").splitlines()[0], "the end")
    assert "succeeded" in call_launch(tmp_path, "status", "mine"), call_launch(tmp_path, "logs", "mine")
    assert read_steps(tmp_path / "mine") == [1, 2]
    assert "step 2/2" in call_launch(tmp_path, "logs", "mine")
