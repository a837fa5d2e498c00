"""Checks of every node of a run, before ranks and engines start on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_grpo.cluster.futures import gather
from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import read_policy_shape
from megatron_grpo.preflight.machine_checks import find_missing_libraries
from megatron_grpo.preflight.node_checks import examine_node

# Problems and remarks of a node.
Report = tuple[list[Problem], list[Problem]]
NAMED_NODES = 3  # of the nodes with the same problem, in a message


def check_nodes(config: Config, folder: Path, run_dir: Path) -> list[str]:
    """Check every node with GPUs of a cluster that was joined; returns remarks.

    Otherwise NCCL, vLLM or a rank would find what a node lacks, minutes later and in other words. `folder` has the
    policy. Without a cluster the checks of this machine were enough. RunError: nodes that cannot take part.
    """
    if config.cluster.ray_address is None or config.cluster.gpus == 0:
        return []
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0)]
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    shape, folders = read_policy_shape(config, folder), list_shared_folders(config, folder, run_dir)
    examine: Any = ray.remote(num_cpus=0, max_retries=0)(examine_here)
    calls = []
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls.append(examine.options(scheduling_strategy=on_node).remote(config, shape, folders))
    timeout_s = config.cluster.startup_timeout_s
    reports = gather(calls, deadline_s=timeout_s, phase_name="checks of the nodes", name=hosts.__getitem__)
    by_host = dict(zip(hosts, reports, strict=True))
    problems = list(describe_reports({host: report[0] for host, report in by_host.items()}))
    if problems:
        raise RunError("\n  ".join(["nodes cannot take part in the run:", *problems]))
    return list(describe_reports({host: report[1] for host, report in by_host.items()}))


def list_shared_folders(config: Config, folder: Path, run_dir: Path) -> list[str]:
    """List the folders that processes on every node read or write."""
    folders = [folder.resolve(), run_dir.resolve()]
    folders += [Path(config.refit.directory).resolve()] if config.refit.directory is not None else []
    return [str(path) for path in folders if path.is_dir()]


def examine_here(config: Config, shape: ModelShape, folders: Sequence[str]) -> Report:
    """Examine the node of this process."""
    problems, remarks = examine_node(config, shape, folders)
    has_engines = config.needs_generation and not config.generation.server.urls
    return [*find_missing_libraries(trains=config.debug.train, samples=has_engines), *problems], remarks


def describe_reports(reports: Mapping[str, Sequence[Problem]]) -> Iterator[str]:
    """Yield a line for each problem, with the nodes that have it."""
    hosts: defaultdict[Problem, list[str]] = defaultdict(list)
    for host, problems in reports.items():
        for problem in problems:
            hosts[problem].append(host)
    for problem, names in hosts.items():
        rest = f" and {len(names) - NAMED_NODES} more" if len(names) > NAMED_NODES else ""
        yield f"{', '.join(names[:NAMED_NODES])}{rest}: {problem.subject} {problem.text}"
