"""Every node of a cluster is examined before ranks start on it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms import node_reports
from megatron_grpo.algorithms.node_reports import check_nodes
from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Config

LIMIT = Problem("open files 1024", "may be too few")
LOST = Problem("/models/qwen", "is not there")


class FakeRay:
    """A cluster whose nodes answer with reports; a task runs where it is sent to."""

    def __init__(self, reports: dict[str, Any]) -> None:
        self.reports = reports

    def nodes(self) -> list[dict[str, Any]]:
        nodes = [(host, {"GPU": 8.0}, True) for host in self.reports]
        nodes += [("login", {}, True), ("gone", {"GPU": 8.0}, False)]
        return [
            {"NodeManagerHostname": host, "NodeID": host.encode().hex().zfill(56), "Resources": has, "Alive": is_alive}
            for host, has, is_alive in nodes
        ]

    def remote(self, **_: Any) -> Any:
        def on_node(scheduling_strategy: Any) -> Any:
            host = bytes.fromhex(scheduling_strategy.node_id).strip(b"\0").decode()
            return SimpleNamespace(remote=lambda *_: self.reports[host])

        return lambda function: SimpleNamespace(options=on_node)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    config = Config()
    config.cluster.ray_address, config.cluster.gpus_per_node = "10.0.0.1:6379", 8
    monkeypatch.setattr(node_reports, "read_policy_shape", lambda *_: None)
    monkeypatch.setattr(node_reports, "gather", lambda calls, **_: calls)
    return config


def examine(reports: dict[str, Any], config: Config, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    monkeypatch.setattr(node_reports, "ray", FakeRay(reports))
    return check_nodes(config, folder, folder)


def test_nodes_with_the_same_lack_share_a_line(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reports = {f"node{number}": ([], [LIMIT] if number else []) for number in range(6)}
    assert examine(reports, config, monkeypatch, tmp_path) == [
        "node1, node2, node3 and 2 more: open files 1024 may be too few"
    ]


def test_a_node_that_cannot_take_part_ends_the_start(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reports = {"node0": ([], []), "node1": ([LOST], [LIMIT])}
    with pytest.raises(RunError, match="nodes cannot take part in the run:\n  node1: /models/qwen is not there"):
        examine(reports, config, monkeypatch, tmp_path)


def test_a_machine_without_a_cluster_was_checked_before(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config.cluster.ray_address = None
    assert examine({"here": ([LOST], [])}, config, monkeypatch, tmp_path) == []
