"""Late processes are named with their stacks; after a killed driver its processes and files are removed."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_grpo.cluster import overdue as late
from megatron_grpo.cluster.cleanup import REFRESH_S
from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, Heartbeat, read_heartbeats
from megatron_grpo.cluster.overdue import (
    MAX_DESCRIBED,
    ProcessStatus,
    describe_activity,
    report_hanging,
    report_overdue,
    request_stacks,
)
from megatron_grpo.cluster.phases import Phase
from megatron_grpo.cluster.process_log import build_log_path, driver_log, find_current_log
from tests.support.logged_processes import HOLDS_THE_INTERPRETER, SLEEPS, WAITS_FOR_WORK, logged_processes, stop
from tests.support.programs import read_programs


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of the logs, in a process that is the driver."""
    with driver_log(tmp_path, "info") as folder:
        yield folder


def test_a_stopped_process_is_told_from_one_that_waits_for_it(folder: Path) -> None:
    with logged_processes(folder, {"policy rank 0": SLEEPS, "policy rank 1": SLEEPS}) as processes:
        stop(processes["policy rank 1"])
        time.sleep(2.5)
        text = report_overdue("training step", ["policy rank 0", "policy rank 1"])
        pids = {name: process.pid for name, process in processes.items()}
    first, second = text.removeprefix("; ").split("; ")[:2]
    assert first.startswith(f"policy rank 1 (pid {pids['policy rank 1']} on ")
    assert "is in phase 'train', entered " in first
    assert ", last heartbeat " in first
    assert first.endswith(" s ago: its process is stopped (SIGSTOP)")
    assert second.startswith(f"policy rank 0 (pid {pids['policy rank 0']} on ")
    assert "last heartbeat" not in second
    assert text.endswith(f"; stacks are in {folder}")
    stacks = build_log_path(folder, "policy rank 0").read_text()
    assert "[driver] training step is overdue; the stacks of the process's threads:" in stacks
    assert 'File "<string>"' in stacks
    outside = build_log_path(folder, "policy rank 1").read_text()
    assert "training step is overdue and this process is stopped; its stacks" in outside
    assert "where the processes are" in build_log_path(folder, "driver").read_text()


def test_a_process_that_holds_its_interpreter_is_found_and_writes_its_stacks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "SILENT_BEATS", 1.5)
    with logged_processes(folder, {"policy rank 0": HOLDS_THE_INTERPRETER}):
        time.sleep(2.5)
        text = report_overdue("training step", ["policy rank 0"])
    assert "is in phase 'train'" in text
    assert ": its interpreter does not respond" in text
    assert 'File "<string>"' in build_log_path(folder, "policy rank 0").read_text()


def test_stacks_are_waited_for_on_a_busy_machine(folder: Path) -> None:
    name = "policy rank 0"
    log = find_current_log()
    assert log is not None
    with logged_processes(folder, {name: SLEEPS}) as processes:
        (beat,) = (beat for beat in read_heartbeats(folder / HEARTBEATS_FOLDER).values() if beat.name == name)
        stop(processes[name])  # the machine has no time for the process
        later = threading.Timer(1.5, processes[name].send_signal, [signal.SIGCONT])
        later.start()
        request_stacks(log, "training step", [ProcessStatus(beat, state=late.ALIVE, silence_s=0.0)])
        text = build_log_path(folder, name).read_text()
        later.join()
    assert 'File "<string>"' in text


@pytest.mark.slow
def test_a_frozen_process_writes_its_stacks_unasked(folder: Path) -> None:
    """As on another node, to which no signal reaches."""
    with logged_processes(folder, {"policy rank 0": HOLDS_THE_INTERPRETER}):
        time.sleep(13.0)
        assert 'File "<string>"' in build_log_path(folder, "policy rank 0").read_text()


def test_a_process_that_is_gone_and_one_that_never_came(folder: Path) -> None:
    with logged_processes(folder, {"generation engine 0 core": SLEEPS}) as processes:
        processes["generation engine 0 core"].kill()
        processes["generation engine 0 core"].wait()
        text = report_overdue("generation start", ["generation engine 0", "generation engine 1"])
    assert "generation engine 0 core (pid" in text
    assert ": its process is gone" in text
    assert "; generation engine 1 has not begun: it has no log" in text
    assert "generation engine 0 has not begun" not in text


def test_only_those_in_trouble_are_named_beside_another_s_failure(folder: Path) -> None:
    names = ["policy rank 1", "policy rank 10"]
    with logged_processes(folder, dict.fromkeys(names, WAITS_FOR_WORK)) as processes:
        assert report_hanging(names) == ""
        stop(processes["policy rank 10"])
        assert report_hanging(["policy rank 1"]) == "", "rank 10 is not a part of rank 1"
        text = report_hanging(names)
        assert text.startswith("; policy rank 10 (pid ")
        assert "waits for work, for " in text
        assert text.count("; ") == 1


def test_a_process_of_another_machine_is_asked_through_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged_processes(folder, {"policy rank 0": SLEEPS}):
        monkeypatch.setattr(late.beats, "identify_machine", lambda: "another one")
        text = report_overdue("training step", ["policy rank 0"])
        monkeypatch.undo()
        log = build_log_path(folder, "policy rank 0").read_text()
    assert "is in phase 'train'" in text
    assert "the driver asks where this process is" in log
    assert 'File "<string>"' in log


def test_a_pid_that_was_given_to_another_process_is_left_alone(folder: Path) -> None:
    with logged_processes(folder, {"policy rank 0": SLEEPS}) as processes:
        path = folder / HEARTBEATS_FOLDER / "policy_rank_0.json"
        record = json.loads(path.read_text())
        stop(processes["policy rank 0"])
        path.write_text(json.dumps({**record, "beat": record["beat"] - 3600.0}))
        assert ": its process is gone" in report_overdue("training step", ["policy rank 0"])
        assert "SIGSTOP" not in build_log_path(folder, "policy rank 0").read_text()


def test_a_message_about_many_stays_short(folder: Path) -> None:
    template = {"pid": 2**22 + 1, "host": "node7", "machine": "far", "phases": [], "last_phase": "train"}
    names = [f"policy rank {rank}" for rank in range(512)]
    for rank, name in enumerate(names):
        beat = time.time() - (40 if rank == 300 else 1)
        record = {"name": name, "beat": beat, "idle_since": beat, **template}
        (folder / HEARTBEATS_FOLDER / f"policy_rank_{rank}.json").write_text(json.dumps(record))
    text = report_overdue("training step", names)
    first, *_ = text.removeprefix("; ").split("; ")
    does = r"waits for work, for 4\d s after phase 'train', last heartbeat 4\d s ago"
    assert re.fullmatch(rf"policy rank 300 \(pid 4194305 on node7\) {does}: its process or its machine hangs", first)
    assert f"; the driver's log lists {512 - MAX_DESCRIBED} more; " in text
    assert len(text) < 1000
    assert build_log_path(folder, "driver").read_text().count("policy rank ") == 512


def test_without_a_log_nothing_is_known() -> None:
    assert report_overdue("training step", ["policy rank 0"]) == ""
    assert report_hanging(["policy rank 0"]) == ""


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ([], "waits for work, for 7 s"),
        ([Phase("train", 0.0)], "is in phase 'train', entered 20 s ago"),
        ([Phase("start", -5.0), Phase("load", 18.0)], "is in phases 'start' (25 s ago), 'load' (2 s ago)"),
        ([Phase("generate", 10.0, 37)], "is in phases 'generate' (37 times, the first 10 s ago)"),
    ],
)
def test_what_a_process_does_in_words(phases: list[Phase], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 20.0)
    assert describe_activity(heartbeat(phases)) == text


@pytest.mark.parametrize(
    ("state", "silence_s", "hangs"),
    [("alive", 2.0, False), ("alive", 6.0, True), ("far", 6.0, False), ("far", 31.0, True), ("stopped", 0.0, True)],
)
def test_who_hangs(state: str, silence_s: float, hangs: bool) -> None:
    """The clock of another machine may be off, so it gets more time."""
    assert ProcessStatus(heartbeat([]), state, silence_s).is_hanging == hangs


def heartbeat(phases: list[Phase]) -> Heartbeat:
    return Heartbeat("policy rank 0", 1, "here", "machine", 20.0, tuple(phases), idle_since=13.0, last_phase=None)


def test_the_last_error_of_a_process_that_is_gone_is_quoted(folder: Path) -> None:
    name = "generation engine 0 core"
    with logged_processes(folder, {name: SLEEPS}) as processes:
        processes[name].kill()
        processes[name].wait()
        with build_log_path(folder, name).open("a") as log:
            log.write(
                "ValueError: an earlier one\n(EngineCore pid=7) ERROR 11-24 [core.py:1] RuntimeError: no room\nend\n"
            )
        text = report_hanging(["generation engine 0"])
    assert "its process is gone" in text
    assert text.endswith(f"; {build_log_path(folder, name)} ends with RuntimeError: no room")


# The child ignores SIGTERM and has a session of its own; its child outlives it.
CHILD = "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"
DRIVER = f"""
import subprocess, sys, time
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill():
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
    print("up", flush=True)
    sys.stdin.readline()
print("left", flush=True)
time.sleep(300)
"""


def wait_for_looks(driver: int, *, sleeps: bool = True) -> None:
    """Wait until a driver's clean-up process has looked twice since the driver's last processes have started.

    A busy machine takes seconds to start each of them; a look is seen by what it reads in /proc.
    """
    deadline = time.monotonic() + 60

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def find(name: str) -> list[psutil.Process]:
        family = psutil.Process(driver).children(recursive=True)
        return [process for process in family if name in " ".join(process.cmdline()[:3])]

    def count_reads() -> int:
        return sum(process.io_counters().read_count for process in find("cluster.cleanup"))

    def has_begun() -> bool:
        return any("psutil" in Path(f"/proc/{process.pid}/maps").read_text() for process in find("cluster.cleanup"))

    wait_until(lambda: has_begun() and bool(find("sleep 300")) == sleeps)
    for _ in range(3):  # the first may have begun before
        reads = count_reads()
        wait_until(lambda before=reads: count_reads() > before)  # type: ignore[misc]
        time.sleep(REFRESH_S / 4)


ENDS = pytest.mark.parametrize(
    "killed", [pytest.param(True, id="killed"), pytest.param(False, id="cleaned up", marks=pytest.mark.slow)]
)


@ENDS
def test_processes_end_with_a_killed_driver_only(killed: bool) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout.readline() == "up\n"
    wait_for_looks(driver.pid)
    family = psutil.Process(driver.pid).children(recursive=True)
    sleepers = [process for process in family if "cluster.cleanup" not in " ".join(process.cmdline())]
    assert len(sleepers) == 2
    if not killed:
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "left\n"
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=20 if killed else 8)
    for process in alive:
        process.kill()
    assert set(alive) == (set() if killed else set(sleepers))


SHARING = read_programs("cleanup")["sharing"]
FORGETFUL_DRIVER = f"""
import subprocess, sys
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill() as remove_if_killed:
    remove_if_killed(sys.argv[1])
    subprocess.Popen([sys.executable, "-c", {SHARING!r}], start_new_session=True)
    sys.stdin.readline()
"""


@ENDS
def test_what_a_killed_driver_made_is_removed(killed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a session of Ray" / "r"
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", FORGETFUL_DRIVER, str(folder.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdin is not None
        segment = Path("/dev/shm") / driver.stdout.readline().strip()
        family = psutil.Process(driver.pid).children(recursive=True)
        assert segment.is_file()
        wait_for_looks(driver.pid, sleeps=False)
        if killed:
            driver.kill()
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
        driver.wait(30)
    _, alive = psutil.wait_procs(family, timeout=20 if killed else 8)
    try:
        assert (folder.exists(), segment.exists(), bool(alive)) == (not killed, not killed, not killed)
    finally:
        for process in alive:
            process.kill()
        segment.unlink(missing_ok=True)


LOSING_DRIVER = f"""
import subprocess, sys
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill():
    children = [subprocess.Popen([sys.executable, "-c", {SHARING!r}]) for _ in range(2)]
    sys.stdin.readline()
    children[0].kill()
    children[0].wait()
print("left", flush=True)
sys.stdin.readline()
"""


def test_what_a_lost_process_shared_is_freed_and_nothing_else() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOSING_DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        segments = [Path("/dev/shm") / driver.stdout.readline().strip() for _ in range(2)]
        wait_for_looks(driver.pid, sleeps=False)
        family = psutil.Process(driver.pid).children(recursive=True)
        try:
            print("go on", file=driver.stdin, flush=True)
            assert driver.stdout.readline() == "left\n"
            assert sorted(segment.exists() for segment in segments) == [False, True], "one of them still runs"
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
            driver.kill()
            for segment in segments:
                segment.unlink(missing_ok=True)


ORPHANING_DRIVER = f"""
import os, signal, subprocess, sys, time
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill():
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
    print("up", flush=True)
    sys.stdin.readline()
    child.kill()
    child.wait()
print("left", flush=True)
time.sleep(300)
"""


def test_what_outlives_the_end_of_its_parent_is_ended_even_if_it_is_stopped() -> None:
    """Ray's agent is gone and its stopped worker is still there: nobody else would end it."""
    driver = subprocess.Popen(
        [sys.executable, "-c", ORPHANING_DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout.readline() == "up\n"
    wait_for_looks(driver.pid)
    (orphan,) = [child for child in psutil.Process(driver.pid).children(recursive=True) if child.name() == "sleep"]
    orphan.suspend()
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "left\n", "the driver goes on when the clean-up is done"
    try:
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    finally:
        driver.kill()
        driver.wait()
