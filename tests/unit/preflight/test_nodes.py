"""What is remarked on a machine with GPUs."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.config.schema import Config
from megatron_grpo.preflight import node_checks
from megatron_grpo.preflight.node_checks import find_node_remarks, read_cuda_release

UNLIMITED = resource.RLIM_INFINITY


def make_config(gpus: int = 8, nodes: int = 1) -> Config:
    config = Config()
    config.cluster.gpus_per_node, config.cluster.num_nodes = gpus, nodes
    return config


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine that lacks nothing; the test may take from it."""
    values: dict[str, Any] = {"driver": "580.65.06", "files": 65_535, "locked": UNLIMITED, "shared": 2**34}
    limits = {resource.RLIMIT_NOFILE: "files", resource.RLIMIT_MEMLOCK: "locked"}
    monkeypatch.setattr(node_checks.resource, "getrlimit", lambda kind: (values[limits[kind]], UNLIMITED))
    monkeypatch.setattr(
        node_checks.os, "statvfs", lambda _: SimpleNamespace(f_blocks=values["shared"] // 4096, f_frsize=4096)
    )
    monkeypatch.setattr(node_checks, "read_cuda_release", lambda: 13)
    monkeypatch.setattr(node_checks, "query_gpus", lambda field: [values["driver"]] * (field == "driver_version"))
    return values


@pytest.mark.parametrize(
    ("lack", "nodes", "subject", "text"),
    [
        ({}, 2, None, ""),
        ({"driver": "575.57.08"}, 1, "NVIDIA driver 575", "CUDA 13, which needs driver 580 or newer"),
        ({"files": 1024}, 1, "open files 1024", "ulimit -n 65535"),
        ({"files": UNLIMITED}, 1, None, ""),
        ({"locked": 2**16}, 2, "locked memory 65536 bytes", "ulimit -l unlimited"),
        ({"locked": 2**16}, 1, None, ""),
        ({"shared": 2**26}, 1, "/dev/shm 0.1 GiB", "--shm-size=16g"),
    ],
)
def test_a_lack_is_remarked(
    lack: dict[str, Any], nodes: int, subject: str | None, text: str, machine: dict[str, Any]
) -> None:
    machine |= lack
    remarks = list(find_node_remarks(make_config(nodes=nodes)))
    assert [remark.subject for remark in remarks] == [subject] * (subject is not None)
    assert all(text in remark.text for remark in remarks)
    assert list(find_node_remarks(make_config(gpus=0, nodes=nodes))) == []


def test_the_release_of_cuda_is_torchs() -> None:
    release = torch.version.cuda
    assert read_cuda_release() == (None if release is None else int(release.partition(".")[0]))
