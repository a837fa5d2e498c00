"""RayJobs are valid to KubeRay's schema, name secrets only, and keep the run's folder on the volume."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.launch.kubernetes import KubernetesTarget
from megatron_grpo.launch.launch_request import Request
from megatron_grpo.preflight.load import compose_config

SCHEMA = yaml.safe_load((Path(__file__).parents[2] / "data" / "kuberay_rayjob_v1.7.0.yaml").read_text())
RECIPE = ("+exp=llama3_70b_slurm", "launch.image=registry/grpo:cuda", "launch.kubernetes.volume=work")
OPTIONS = (
    "launch=infiniband",
    "launch.generation_nodes=4",
    "launch.time_limit_s=86400",
    "launch.kubernetes.queue=team-a",
    "launch.kubernetes.secrets=[hub-token,tracker]",
    "launch.kubernetes.cpus=96",
    "launch.kubernetes.memory_gib=1500",
    'launch.kubernetes.node_labels=["gpu.kind=h100"]',
    'launch.kubernetes.generation_node_labels=["gpu.kind=l40s"]',
    "launch.kubernetes.retries=5",
    "launch.kubernetes.submission_mode=SidecarMode",
)


def make_request(*overrides: str, arguments: tuple[str, ...] = (), run_dir: str = "outputs/mine") -> Request:
    return Request(compose_config([*RECIPE, *overrides]), arguments, run_dir, Path("/home/me"))


def read_manifest(*overrides: str, arguments: tuple[str, ...] = (), run_dir: str = "outputs/mine") -> dict[str, Any]:
    text = KubernetesTarget().render(make_request(*overrides, arguments=arguments, run_dir=run_dir))
    manifest: dict[str, Any] = yaml.safe_load(text)
    return manifest


@pytest.mark.parametrize("overrides", [(), OPTIONS, ("launch.kubernetes.start_deadline_s=null",)], ids=str)
def test_manifests_are_valid(overrides: tuple[str, ...]) -> None:
    jsonschema.validate(read_manifest(*overrides), SCHEMA)


@pytest.mark.parametrize("damage", [("backoffLimit", "3"), ("backofLimit", 3), ("submissionMode", "Http")], ids=str)
def test_the_schema_refuses_mistakes(damage: tuple[str, object]) -> None:
    manifest = read_manifest()
    manifest["spec"][damage[0]] = damage[1]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_a_job_has_the_keys_of_the_launch() -> None:
    manifest = read_manifest(*OPTIONS)
    spec, cluster = manifest["spec"], manifest["spec"]["rayClusterSpec"]
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert (spec["suspend"], spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (True, 5, 86400)
    assert (spec["submissionMode"], spec["preRunningDeadlineSeconds"]) == ("SidecarMode", 3600)
    assert cluster["authOptions"] == {"mode": "token"}
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert {name: group["replicas"] for name, group in groups.items()} == {"training": 4, "generation": 4}
    assert groups["training"]["labels"] == {"megatron-grpo-role": "training"}
    pod = groups["generation"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu.kind": "l40s"}
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": "8",
        "cpu": "96",
        "memory": "1536000Mi",
        "rdma/ib": "8",
    }
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert container["envFrom"] == [{"secretRef": {"name": "hub-token"}}, {"secretRef": {"name": "tracker"}}]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "65536Mi"}} in pod["volumes"]


def test_pods_without_groups_have_no_role() -> None:
    (group,) = read_manifest()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group.get("labels")) == ("workers", 8, None)


def test_secrets_of_the_environment_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "swordfish")
    assert "swordfish" not in KubernetesTarget().render(make_request(*OPTIONS))


@settings(max_examples=30)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_no_text_of_the_user_leaves_its_quotes(text: str) -> None:
    """YAML gives the entrypoint back as it was, and the shell of a pod the arguments."""
    text = text.replace("\x85", "")  # a line break of YAML 1.1 that its writer cannot quote
    request = make_request(arguments=(f"policy.model.path={text}",), run_dir=f"outputs/{text}")
    entrypoint = yaml.safe_load(KubernetesTarget().render(request))["spec"]["entrypoint"]
    words = shlex.split(entrypoint)
    assert words[-2:] == [f"run_dir=outputs/{text}", f"policy.model.path={text}"]
    printing = entrypoint.replace("cd /workspace && exec", "cd / && printf '%s\\0'")
    process = subprocess.run(["sh", "-c", printing], capture_output=True, check=True)
    assert process.stdout.decode().split("\0")[-3:-1] == words[-2:]


@pytest.mark.parametrize("key", ["namespace", "volume", "queue", "secrets"])
def test_names_of_objects_are_checked(key: str) -> None:
    value = "[a_b]" if key == "secrets" else "a_b"
    with pytest.raises(ConfigError, match=f"launch.kubernetes.{key}"):
        compose_config(["+exp=quickstart", f"launch.kubernetes.{key}={value}"])


def test_pods_need_an_image_and_a_volume() -> None:
    problems = list(KubernetesTarget().find_problems(compose_config(["+exp=quickstart", "launch.seeds=[1,2]"])))
    assert [problem.key for problem in problems] == ["launch.seeds", "launch.image", "launch.kubernetes.volume"]


FAKE_KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>{log}
case "$*" in
*"get rayjob"*) echo '{{"status": {{"jobStatus": "RUNNING", "jobDeploymentStatus": "Running", "jobId": "j1",
    "rayClusterName": "c1"}}}}' ;;
*"get pods"*) echo pod/head ;;
*ls*) echo 'policy_rank_3.log driver.log' ;;
esac
"""


def test_kubectl_gets_the_manifest_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for kubectl records its arguments: the commands, not a cluster, are what is tested."""
    (tmp_path / "kubectl").write_text(FAKE_KUBECTL.format(log=tmp_path / "log"))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    target, request, file = KubernetesTarget(), make_request(), tmp_path / "rayjob.yaml"
    file.write_text(target.render(request))
    launch = target.submit(request, file)
    assert "running" in target.describe(launch)
    target.stop(launch)
    target.print_log(launch, "policy.3", 5, True)
    target.print_log(launch, None, 5, True)
    target.cancel(launch)
    commands = (tmp_path / "log").read_text().splitlines()
    assert commands[0] == f"create --filename {file}"
    assert "exec --namespace default pod/head -- touch /workspace/outputs/mine/stop" in commands
    assert (
        "exec --namespace default pod/head -- tail -n 5 -F /workspace/outputs/mine/logs/policy_rank_3.log" in commands
    )
    assert "exec --namespace default pod/head -- ray job logs --follow j1" in commands
    assert commands[-1] == f"delete rayjob {launch.job} --namespace default --wait=false"
