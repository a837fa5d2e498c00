"""Lines about waits: when they come, and what they name."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.cluster import wait_notices
from megatron_grpo.cluster.heartbeat import identify_machine
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.wait_notices import WaitNotices, announce_waits, describe_wait


def wait_for(lines: list[str], count: int) -> None:
    """Wait until there are some lines, at most 10 s."""
    deadline = time.monotonic() + 10
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(lines) >= count


@pytest.fixture
def lines() -> Iterator[list[str]]:
    lines: list[str] = []
    notices = WaitNotices(lines.append, first_s=0.05)
    yield lines
    notices.close()
    notices.close()


def test_a_silence_is_described_again_and_again(lines: list[str]) -> None:
    with phase("scoring"), phase("environment"):
        wait_for(lines, 3)
    assert all(line.endswith("s so far, in scoring, environment") for line in lines[:3])


def test_a_step_of_the_usual_length_is_no_silence() -> None:
    lines: list[str] = []
    notices = WaitNotices(lines.append, first_s=0.05)
    notices.restart(usual_s=60.0)
    lines.clear()
    time.sleep(0.3)
    notices.close()
    assert not lines


def test_commands_say_it_on_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitNotices.__init__, "__kwdefaults__", {"first_s": 0.05})
    with announce_waits(), phase("the dry run of rank 3"):
        deadline, errors = time.monotonic() + 10, ""
        while not errors and time.monotonic() < deadline:
            time.sleep(0.05)
            output = capsys.readouterr()
            errors += output.err
            assert output.out == ""
    assert re.match(r"waiting: \d+ s so far, in the dry run of rank 3\n", errors)


def write_heartbeat(
    folder: Path, name: str, *, seconds: float, beat_age: float = 0.0, pid: int | None = None, phase: str = "score"
) -> None:
    now = time.time()
    record: dict[str, Any] = {
        "name": name,
        "pid": os.getpid() if pid is None else pid,
        "host": "here",
        "machine": identify_machine(),
        "beat": now - beat_age,
        "phases": [{"name": phase, "since": now - seconds, "count": 1}],
        "idle_since": now - seconds,
        "last_phase": None,
    }
    (folder / f"{name.replace(' ', '_')}.json").write_text(json.dumps(record))


def test_the_process_that_is_late_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    monkeypatch.setattr(wait_notices, "find_current_log", lambda: SimpleNamespace(folder=tmp_path, name="driver"))
    write_heartbeat(folder, "generation engine 0 core", seconds=500, phase="serve")
    write_heartbeat(folder, "environment math 0", seconds=20)
    write_heartbeat(folder, "rollout worker 0", seconds=21)
    write_heartbeat(folder, "policy rank 1", seconds=2)
    with phase("generation"):
        text = describe_wait(15.2)
    assert text.startswith("15 s so far, in generation; rollout worker 0 is in phase 'score', entered 21 s ago; env")
    assert "policy rank 1" not in text
    # A stopped or silent process explains the wait better than any that works.
    write_heartbeat(folder, "policy rank 1", seconds=2, beat_age=100)
    assert "; policy rank 1 (pid " in describe_wait(15.2)
    assert "environment math" not in describe_wait(15.2)
