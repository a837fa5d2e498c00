"""The keys of a launch: where a job runs, and what is asked for it."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Predicate
from pydantic import Field

from megatron_grpo.config.section import (
    CONNECTS,
    SENDS_SECRET,
    NonNegative,
    PathText,
    Positive,
    PositiveFloat,
    Section,
    Seed,
    Starts,
)


def _make_check(pattern: str) -> Predicate:
    """Make the check that a whole text matches a pattern."""
    return Predicate(lambda text: re.fullmatch(pattern, text) is not None)


# A batch system, a shell and YAML read these texts, so they have no spaces, quotes, line breaks and $.
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.,:/@%+=*\[\]-]*"
SlurmWord = Annotated[str, _make_check(_WORD), "a word without spaces and quotes"]
SlurmOption = Annotated[str, _make_check(rf"--[a-z][a-z-]*(={_WORD})?"), "--NAME=VALUE", Starts("asks Slurm")]
# Of Kubernetes: the name of an object, and NAME=VALUE of a resource or of a node's label.
ObjectName = Annotated[
    str, _make_check(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"), "small letters, digits, - and . between them"
]
SecretName = Annotated[ObjectName, "the name of an object", Starts(SENDS_SECRET)]
DeviceCount = Annotated[str, _make_check(r"[A-Za-z0-9._/-]+=[1-9][0-9]*"), "NAME=COUNT"]
NodeLabel = Annotated[str, _make_check(r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*"), "NAME=VALUE"]
AbsolutePath = Annotated[str, _make_check(r"/[^\x00-\x1f,:]*"), "an absolute path without commas and colons"]
Mount = Annotated[
    str, _make_check(r"/[^\x00-\x1f,:]*:/[^\x00-\x1f,:]*"), "/FROM:/TO", Starts("mounts a folder of a machine")
]
ImageName = Annotated[
    str, _make_check(r"[^\s'\"\\$`]+"), "an image without spaces and quotes", Starts("runs a container image")
]
Program = Annotated[PathText, Starts("starts a program")]
JobServer = Annotated[str, _make_check(r"https?://[^\s'\"\\$`]+"), "http://HOST:PORT", Starts(CONNECTS)]


class SlurmConfig(Section):
    """Jobs of `launch slurm`."""

    partition: SlurmWord | None = None
    """Partition; null: the cluster's default."""

    account: SlurmWord | None = None
    """Account that is charged; null: the user's default."""

    qos: SlurmWord | None = None
    """Quality of service; null: the account's default."""

    options: list[SlurmOption] = field(default_factory=list)
    """Further options of sbatch, such as ["--constraint=h100"]."""

    generation_options: list[SlurmOption] = field(default_factory=list)
    """Options of the nodes of launch.generation_nodes, such as ["--partition=l40s"]; the others have `options`."""

    mounts: list[Mount] = field(default_factory=list)
    """Mounts of the container besides the job's folders, each /FROM:/TO."""

    save_s: Positive = 240
    """Seconds in which a run ends its step and saves once it is preempted or its time is nearly up; then the job is
    queued again. Slurm is asked for its signal a minute earlier than that."""


class KubernetesConfig(Section):
    """RayJobs of `launch kubernetes`, for KubeRay 1.6 or newer."""

    namespace: ObjectName = "default"
    """Namespace of the job."""

    volume: ObjectName | None = None
    """Claim of a volume that all pods mount (ReadWriteMany): the run's folder, models and caches outlive pods on it."""

    folder: AbsolutePath = "/workspace"
    """Where pods mount the volume. Relative paths begin there, and HF_HOME is its .cache/huggingface."""

    queue: ObjectName | None = None
    """Queue of Kueue, which starts the suspended job when there is room; null: the job starts at once."""

    secrets: list[SecretName] = field(default_factory=list)
    """Secrets whose entries become environment variables of all pods, such as one with HF_TOKEN."""

    submission_mode: Literal["HTTPMode", "K8sJobMode", "SidecarMode"] = "HTTPMode"
    """How KubeRay starts the driver: through Ray's job server, by a pod of its own, or from the head's pod."""

    retries: NonNegative = 3
    """Times that a failed job starts again on new pods; the run goes on from its newest checkpoint."""

    start_deadline_s: Positive | None = 3600
    """Seconds until the job has to run, or it fails; null: it waits. Pods that cannot be placed hold nodes as well."""

    cpus: Positive | None = None
    """CPU cores of each worker pod; null: no request, and Ray counts those of the node."""

    memory_gib: PositiveFloat | None = None
    """Memory of each worker pod in GiB, shared memory included; null: no limit."""

    head_cpus: Positive = 8
    """CPU cores of the head's pod, which has the driver and no GPU."""

    head_memory_gib: PositiveFloat = 32.0
    """Memory of the head's pod in GiB."""

    shared_memory_gib: PositiveFloat = 64.0
    """Size of /dev/shm in GiB: Ray's objects, vLLM's queues and NCCL within a node."""

    devices: list[DeviceCount] = field(default_factory=list)
    """Devices of each worker pod besides GPUs, such as ["rdma/ib=8"]."""

    node_labels: list[NodeLabel] = field(default_factory=list)
    """Labels that the nodes of workers must have."""

    generation_node_labels: list[NodeLabel] = field(default_factory=list)
    """Labels in place of node_labels for the nodes of launch.generation_nodes; empty: the same."""


class RayJobsConfig(Section):
    """Jobs of `launch ray` on a Ray cluster that runs already."""

    address: JobServer | None = None
    """Ray's job server; null: RAY_API_SERVER_ADDRESS of the environment, else http://127.0.0.1:8265."""

    folder: AbsolutePath | None = None
    """Folder of the cluster's machines in which the driver starts; null: the folder in which launch is called."""


class LaunchConfig(Section):
    """A launch by `python -m megatron_grpo.launch` (docs/operations.md); runs do not read these keys."""

    image: ImageName | None = None
    """Container image, of pyxis under Slurm; null: no container, which Kubernetes does not allow."""

    python: Program | None = None
    """Python interpreter of the job; null: python3 in a container, else the one that runs launch."""

    time_limit_s: Annotated[int, Field(ge=60)] | None = None
    """Seconds after which the job is ended; null: Slurm's default, no limit on Kubernetes."""

    generation_nodes: Positive | None = None
    """Nodes of cluster.num_nodes for engines alone, so that training has the others; null: they share all nodes."""

    spares: NonNegative = 0
    """Nodes that Slurm gives besides those that the run needs, in place of nodes that fail the check at the start."""

    check_s: Positive = 180
    """Seconds in which each node under Slurm has to pass the check of its GPUs, network, memory and folder."""

    seeds: list[Seed] = field(default_factory=list)
    """A run for each seed, in RUN_DIR/seed_N, as an array of Slurm jobs; empty: one run."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    ray: RayJobsConfig = field(default_factory=RayJobsConfig)
