"""A process tells what it is doing, cheaply, to whoever reads its file."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.cluster.heartbeat import (
    BEAT_S,
    RECORD_BYTES,
    SHOWN_PHASES,
    HeartbeatWriter,
    build_file_stem,
    build_requests_path,
    read_heartbeats,
)
from megatron_grpo.cluster.phases import phase


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HeartbeatWriter]:
    with (tmp_path / "log").open("w") as log:
        writer = HeartbeatWriter(tmp_path, "policy rank 3", log)
        writer.start()
        yield writer
        writer.stop()


def next_beat(folder: Path) -> tuple[list[tuple[str, int]], float]:
    """(name, count) of the phases in the next record that is written, and how old the first phase is."""
    before = read_heartbeats(folder)["policy rank 3"].beat
    while (beat := read_heartbeats(folder)["policy rank 3"]).beat == before:
        time.sleep(0.01)
    return [(one.name, one.count) for one in beat.phases], beat.beat - beat.phases[0].since if beat.phases else 0.0


@pytest.mark.usefixtures("writer")
def test_the_record_follows_the_phases(tmp_path: Path) -> None:
    assert next_beat(tmp_path) == ([], 0.0)
    with phase("train"):
        time.sleep(0.2)
        with phase("optimizer step"):
            phases, age = next_beat(tmp_path)
            assert phases == [("train", 1), ("optimizer step", 1)]
            assert 0.2 <= age <= 0.2 + 2 * BEAT_S
    assert next_beat(tmp_path) == ([], 0.0)
    with pytest.raises(ZeroDivisionError), phase("train"):
        _ = 1 / 0
    assert next_beat(tmp_path) == ([], 0.0)


@pytest.mark.usefixtures("writer")
def test_a_phase_is_on_disk_before_its_body_runs(tmp_path: Path) -> None:
    """A process that is stopped right after must not look as if it waited for work."""
    time.sleep(0.2)
    with phase("train"):
        assert [one.name for one in read_heartbeats(tmp_path)["policy rank 3"].phases] == ["train"]


@pytest.mark.usefixtures("writer")
def test_calls_side_by_side_are_counted(tmp_path: Path) -> None:
    @phase("generate")
    async def generate(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def all_at_once() -> tuple[list[tuple[str, int]], float]:
        calls = [asyncio.create_task(generate(seconds)) for seconds in (0.01, 3.0, 3.0, 3.0)]
        await asyncio.sleep(0.3)
        found = await asyncio.to_thread(next_beat, tmp_path)
        assert calls[0].result() == 0.01
        for call in calls:
            call.cancel()
        return found

    phases, age = asyncio.run(all_at_once())
    assert phases == [("generate", 3)]
    assert age >= 0.3
    assert next_beat(tmp_path) == ([], 0.0), "cancelled calls are in no phase"


@pytest.mark.usefixtures("writer")
def test_every_record_has_the_same_length(tmp_path: Path) -> None:
    """It is overwritten in place: a shorter one would leave the end of a longer one behind it."""
    sizes = set()
    for depth in (0, 1, SHOWN_PHASES + 3, 2):
        scopes = [phase(f"a phase with quite a long name, as they go, number {number}") for number in range(depth)]
        for scope in scopes:
            scope.__enter__()
        names, _ = next_beat(tmp_path)
        assert len(names) == min(depth, SHOWN_PHASES)
        sizes.add((tmp_path / "policy_rank_3.json").stat().st_size)
        for scope in reversed(scopes):
            scope.__exit__(None, None, None)
    assert sizes == {RECORD_BYTES}


def test_half_a_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"name": "policy ra')
    assert read_heartbeats(tmp_path) == {}
    assert read_heartbeats(tmp_path / "nowhere") == {}


@pytest.mark.usefixtures("writer")
def test_whoever_appends_to_the_requests_gets_the_stacks(tmp_path: Path) -> None:
    with build_requests_path(tmp_path, "policy rank 3").open("ab") as file:
        file.write(b"!")
    end = time.monotonic() + 5
    while "next_line_of_this_test" not in (tmp_path / "log").read_text() and time.monotonic() < end:
        next_line_of_this_test()
    stacks = (tmp_path / "log").read_text()
    assert "next_line_of_this_test" in stacks
    time.sleep(1.5 * BEAT_S)
    assert (tmp_path / "log").read_text() == stacks, "one request, one answer"


def next_line_of_this_test() -> None:
    time.sleep(0.05)


def test_debug_has_two_lines_a_phase_and_an_error_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "megatron_grpo.cluster.phases"):
        with phase("train"):
            pass
        with pytest.raises(ValueError, match="no"), phase("refit"):
            raise ValueError("no")
    begins, took, _, failed = caplog.records
    assert begins.getMessage() == "train: begins"
    assert took.getMessage().startswith("train: took 0.0")
    assert failed.levelno == logging.ERROR
    assert failed.exc_info is not None


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("policy rank 0", "policy_rank_0"),
        ("environment my/task worker 12", "environment_my_task_worker_12"),
        ("driver", "driver"),
    ],
)
def test_file_names(name: str, stem: str) -> None:
    assert build_file_stem(name) == stem


@pytest.mark.slow
def test_a_beat_costs_little_more_than_its_write(tmp_path: Path) -> None:
    """Compared with a thread that only writes as often, since what waking up costs depends on the machine."""
    code = """
import sys, threading, time
from pathlib import Path
from megatron_grpo.cluster.heartbeat import BEAT_S, HeartbeatWriter
from megatron_grpo.cluster.phases import phase

def measure():
    before = time.process_time()
    time.sleep(4)
    return time.process_time() - before

def write(stopped):
    while not stopped.wait(BEAT_S):
        Path(sys.argv[1], "plain").write_bytes(bytes(1000))

stopped = threading.Event()
threading.Thread(target=write, args=(stopped,)).start()
plain = measure()
stopped.set()
with open(sys.argv[1] + "/log", "w") as log:
    HeartbeatWriter(Path(sys.argv[1]), "busy", log).start()
    with phase("train"):
        time.sleep(0.5)
        print(measure(), plain)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    beating, plain = map(float, done.stdout.split())
    assert beating < 5 * plain + 0.02
