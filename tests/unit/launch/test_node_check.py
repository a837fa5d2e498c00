"""A node is examined before a run takes it."""

import resource
from pathlib import Path

import pytest

from megatron_grpo.launch import node_check


def make_devices(folder: Path, *states: str) -> Path:
    """Network adapters with a port each, in the given states."""
    for number, state in enumerate(states):
        port = folder / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    return folder


def test_links_that_are_up_are_counted(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "4: ACTIVE", "1: DOWN", "4: ACTIVE")
    assert node_check.count_links(devices) == 2
    assert node_check.count_links(tmp_path / "none") == 0


def test_problems_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "query_gpus", lambda field: ["GPU-1"] * 7)
    monkeypatch.setattr(node_check, "measure_shared_memory", lambda: 2**26)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert list(node_check.find_node_problems(8, 2, make_devices(tmp_path, "4: ACTIVE"))) == [
        "7 of 8 GPUs answer",
        "open files are limited to 1024, and 65535 are needed",
        "locked memory is limited to 1024 bytes, and the network needs it unlimited",
        "/dev/shm has 0.1 GiB, and 8 are needed",
    ]


def test_adapters_without_a_link_are_a_problem(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "1: DOWN", "1: DOWN")
    assert list(node_check.find_node_problems(0, 0, devices)) == ["no port of its network adapters is up"]


def test_a_folder_is_shared_if_it_has_the_mark(tmp_path: Path) -> None:
    assert not node_check.has_mark(tmp_path, "abc", deadline_s=0)
    (tmp_path / node_check.MARK_FILE).write_text("other")
    assert not node_check.has_mark(tmp_path, "abc", deadline_s=0)
    (tmp_path / node_check.MARK_FILE).write_text("abc")
    assert node_check.has_mark(tmp_path, "abc", deadline_s=0)


def test_the_last_line_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / node_check.MARK_FILE).write_text("abc")
    assert node_check.main([str(tmp_path), "abc", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" links")
