"""Whose a run's folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.directory import changes_since_last_start, claimed_run_directory, record_start


def test_what_a_run_was_started_with_and_what_changed_since(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed_run_directory(str(folder)):
        given = ["+exp=quickstart", f"run_dir={folder}"]  # whose default has the time of day
        first = compose_config(given)
        assert changes_since_last_start(folder, first) == []
        record_start(folder, first)
        assert changes_since_last_start(folder, first) == []
        faster = compose_config([*given, "policy.optimizer.lr=0.5"])
        assert changes_since_last_start(folder, faster) == ["policy.optimizer.lr: 0.001 -> 0.5"]
    assert (tmp_path / "latest").resolve() == folder


def test_another_run_is_refused_once_the_first_has_started(tmp_path: Path) -> None:
    other = compose_config(["+exp=quickstart", "data.train_path=other.jsonl"])
    assert changes_since_last_start(tmp_path, other) == [], "looking alone makes the folder nobody's"
    record_start(tmp_path, compose_config(["+exp=quickstart"]))
    with pytest.raises(ConfigError, match=r"holds another run: its data\.train_path is .*choose another run_dir"):
        changes_since_last_start(tmp_path, other)


def test_a_folder_has_one_driver_at_a_time(tmp_path: Path) -> None:
    first = claimed_run_directory(str(tmp_path))
    with first, pytest.raises(RunError, match="is in use by another run"), claimed_run_directory(str(tmp_path)):
        pass
    with claimed_run_directory(str(tmp_path)) as folder:
        assert folder == tmp_path
