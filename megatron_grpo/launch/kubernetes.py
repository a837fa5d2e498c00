"""RayJobs of KubeRay: a head with the driver, pods of workers, and one volume that outlives them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.cluster.machines import GENERATION_ROLE, ROLE_LABEL, TRAINING_ROLE
from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.launch.launch_request import Request, find_slurm_settings, require_program
from megatron_grpo.launch.target import Launch, Target, choose_log, make_tail_command
from megatron_grpo.run.directory import STOP_FILE

_VOLUME, _SHARED_MEMORY = "work", "shared-memory"
_MOST_NAME = 47  # characters of a RayJob's name, to which KubeRay adds others
_ANSWER_S = 60


class KubernetesTarget(Target):
    """RayJobs, whose files are on a volume that this machine need not have."""

    name = "kubernetes"
    file_name = "rayjob.yaml"
    reach = "nothing"

    def find_problems(self, config: Config) -> Iterator[Problem]:
        """Find settings that a RayJob lacks or cannot have."""
        yield from find_slurm_settings(config)
        if config.launch.image is None:
            yield Problem("launch.image=null", "is needed: pods are containers; docker/Dockerfile.cuda builds an image")
        if config.launch.kubernetes.volume is None:
            text = "is needed: a claim (ReadWriteMany) for the run's folder, which has to outlive the pods"
            yield Problem("launch.kubernetes.volume=null", text)

    def render(self, request: Request) -> str:
        """Write the manifest in YAML."""
        return yaml.safe_dump(build_manifest(request), sort_keys=False, allow_unicode=True)

    def submit(self, request: Request, file: Path) -> Launch:
        """Create the RayJob; RunError: the cluster refuses it."""
        require_program("kubectl", self.name)
        manifest = yaml.safe_load(file.read_text(encoding="utf-8"))
        _call("create", "--filename", str(file))
        settings = {"namespace": manifest["metadata"]["namespace"], "run_dir": find_run_dir(request)}
        return Launch(request.local_run_dir, self.name, manifest["metadata"]["name"], str(request.folder), [], settings)

    def describe(self, launch: Launch) -> str:
        """Describe the state of the RayJob."""
        status = _read_status(launch)
        deployment = status.get("jobDeploymentStatus") or "new"
        parts = [f"RayJob {launch.job} is {deployment.lower()}", status.get("jobStatus", "").lower()]
        parts += [status.get("reason", ""), status.get("message", "")]
        return ", ".join(filter(None, parts)) + (f"; failed {status['failed']} time(s)" if status.get("failed") else "")

    def cancel(self, launch: Launch) -> None:
        """Delete the RayJob and its pods."""
        _call("delete", "rayjob", launch.job, "--namespace", launch.settings["namespace"], "--wait=false")

    def stop(self, launch: Launch) -> str:
        """Put the stop file into the folder, or delete a waiting job."""
        run_dir = launch.settings["run_dir"]
        if _read_status(launch).get("jobStatus") != "RUNNING":
            self.cancel(launch)
            return f"RayJob {launch.job} had not begun, and is deleted"
        _call_in_head(launch, "touch", f"{run_dir}/{STOP_FILE}")
        return f"{run_dir} will end after the step that it is in, with a checkpoint"

    def print_log(self, launch: Launch, process: str | None, lines: int, follow: bool) -> int:
        """Print the driver's output, or the log of a process, from the head's pod."""
        if process is None:
            job = str(_read_status(launch).get("jobId", ""))
            command = ["ray", "job", "logs", *(["--follow"] if follow else []), job]
        else:
            folder = f"{launch.settings['run_dir']}/logs"
            names = _call_in_head(launch, "ls", folder).split()
            command = [*make_tail_command(lines, follow), f"{folder}/{choose_log(names, process)}"]
        return subprocess.run(["kubectl", *_make_exec(launch), *command], check=False).returncode


def build_manifest(request: Request) -> dict[str, Any]:
    """Build the RayJob of a run."""
    config, launch, settings = request.config, request.config.launch, request.config.launch.kubernetes
    training = config.cluster.num_nodes - (launch.generation_nodes or 0)
    role = TRAINING_ROLE if launch.generation_nodes is not None else None
    workers = [_build_workers(config, "workers" if role is None else role, training, role, settings.node_labels)]
    if launch.generation_nodes is not None:
        node_labels = settings.generation_node_labels or settings.node_labels
        workers.append(_build_workers(config, GENERATION_ROLE, launch.generation_nodes, GENERATION_ROLE, node_labels))
    spec: dict[str, Any] = {
        "entrypoint": f"cd {shlex.quote(settings.folder)} && exec {shlex.join(request.command)}",
        "submissionMode": settings.submission_mode,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,  # for `status` and `logs` after the end
        "backoffLimit": settings.retries,
        "suspend": settings.queue is not None,
        "preRunningDeadlineSeconds": settings.start_deadline_s,
        "activeDeadlineSeconds": launch.time_limit_s,
        "rayClusterSpec": {
            "rayVersion": version("ray"),
            "authOptions": {"mode": "token"},  # whoever can talk to Ray can run code
            "headGroupSpec": {
                "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": "0"},
                "template": _build_pod(
                    config, "ray-head", {"cpu": str(settings.head_cpus), "memory": _to_bytes(settings.head_memory_gib)}
                ),
            },
            "workerGroupSpecs": workers,
        },
    }
    labels = {"app.kubernetes.io/name": "megatron-grpo"}
    labels |= {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue is not None else {}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": _name_job(config.name), "namespace": settings.namespace, "labels": labels},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def find_run_dir(request: Request) -> str:
    """Find the run's folder in the pods."""
    return str(Path(request.config.launch.kubernetes.folder, request.run_dir))


def _build_workers(config: Config, name: str, nodes: int, role: str | None, labels: list[str]) -> dict[str, Any]:
    settings, gpus = config.launch.kubernetes, config.cluster.gpus
    resources: dict[str, Any] = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    resources |= {"cpu": str(settings.cpus)} if settings.cpus is not None else {}
    resources |= {"memory": _to_bytes(settings.memory_gib)} if settings.memory_gib is not None else {}
    resources |= dict(device.split("=") for device in settings.devices)
    pod = _build_pod(config, "ray-worker", resources)
    if labels:
        pod["spec"]["nodeSelector"] = dict(label.split("=", 1) for label in labels)
    group = {"groupName": name, "replicas": nodes, "minReplicas": nodes, "maxReplicas": nodes, "rayStartParams": {}}
    return group | ({"labels": {ROLE_LABEL: role}} if role is not None else {}) | {"template": pod}


def _build_pod(config: Config, name: str, resources: dict[str, Any]) -> dict[str, Any]:
    launch, settings = config.launch, config.launch.kubernetes
    cache = f"{settings.folder}/.cache"
    variables = {
        "HF_HOME": f"{cache}/huggingface",
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torchinductor",
        "FLASHINFER_WORKSPACE_BASE": cache,
        # Hundreds of processes import from one filesystem at once, and Ray waits for a minute.
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_gcs_server_request_timeout_seconds": "600",
        "RAY_raylet_start_wait_time_s": "600",
    }
    container: dict[str, Any] = {
        "name": name,
        "image": launch.image,
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in settings.secrets],
        "resources": {"limits": resources, "requests": dict(resources)},  # a copy, which YAML writes without an alias
        # NCCL locks memory for its network.
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": _VOLUME, "mountPath": settings.folder},
            {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},
        ],
    }
    memory = {"medium": "Memory", "sizeLimit": _to_bytes(settings.shared_memory_gib)}
    volumes = [
        {"name": _VOLUME, "persistentVolumeClaim": {"claimName": settings.volume}},
        {"name": _SHARED_MEMORY, "emptyDir": memory},
    ]
    # The operator speaks to Kubernetes, and no pod of a run does.
    return {
        "spec": {
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": volumes,
        }
    }


def _to_bytes(gib: float) -> str:
    return f"{round(gib * 1024)}Mi"


def _name_job(name: str) -> str:
    """Name a RayJob by its recipe and the time of the launch."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    words = words if words[0].isalpha() else f"run-{words}"
    stamp = time.strftime("%m%d-%H%M%S")
    return f"{words[: _MOST_NAME - len(stamp) - 1].rstrip('-')}-{stamp}"


def _read_status(launch: Launch) -> dict[str, Any]:
    """Read the status of a RayJob; empty: the operator has not seen it."""
    text = _call("get", "rayjob", launch.job, "--namespace", launch.settings["namespace"], "--output=json")
    status = json.loads(text).get("status", {})
    assert isinstance(status, dict), "status of a RayJob is an object"
    return status


def _make_exec(launch: Launch) -> list[str]:
    """Make the arguments of kubectl that start a command in the head's pod."""
    cluster = _read_status(launch).get("rayClusterName")
    if not cluster:
        raise RunError(f"RayJob {launch.job} has no pods yet")
    namespace = ["--namespace", launch.settings["namespace"]]
    selector = f"ray.io/cluster={cluster},ray.io/node-type=head"
    pods = _call("get", "pods", *namespace, "--selector", selector, "--output=name").split()
    if not pods:
        raise RunError(f"the head of RayJob {launch.job} has no pod now")
    return ["exec", *namespace, pods[0], "--"]


def _call_in_head(launch: Launch, *command: str) -> str:
    return _call(*_make_exec(launch), *command)


def _call(*arguments: str) -> str:
    """Call kubectl; RunError: it fails."""
    try:
        process = subprocess.run(
            ["kubectl", *arguments], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise RunError("kubectl is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"kubectl {arguments[0]} does not answer within {_ANSWER_S} s") from None
    if process.returncode:
        raise RunError(f"kubectl {arguments[0]} fails: {process.stderr.strip()}")
    return process.stdout
