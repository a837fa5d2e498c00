"""A process tells what it is doing: its heartbeat, and a log of its own."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.cluster.heartbeat import (
    BEAT_S,
    BEAT_VARIABLE,
    HEARTBEATS_FOLDER,
    RECORD_BYTES,
    SHARED_BEAT_S,
    SHOWN_PHASES,
    HeartbeatWriter,
    build_file_stem,
    build_requests_path,
    read_beat_s,
    read_heartbeats,
)
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import (
    FOLDER_VARIABLE,
    AdviceOnce,
    begin_process_log,
    build_log_path,
    choose_library_level,
    driver_log,
    find_current_log,
    read_log_environment,
)
from tests.support.logged_processes import BEGIN
from tests.support.programs import read_programs


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
    age = beat.beat - beat.phases[0].since if beat.phases else 0.0
    return [(entry.name, entry.count) for entry in beat.phases], age


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
        assert [entry.name for entry in read_heartbeats(tmp_path)["policy rank 3"].phases] == ["train"]


@pytest.mark.usefixtures("writer")
def test_calls_side_by_side_are_counted(tmp_path: Path) -> None:
    @phase("generate")
    async def generate(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def all_at_once() -> tuple[list[tuple[str, int]], float]:
        calls = [asyncio.create_task(generate(seconds)) for seconds in (0.01, 3.0, 3.0, 3.0)]
        await asyncio.sleep(0.3)
        beat = await asyncio.to_thread(next_beat, tmp_path)
        assert calls[0].result() == 0.01
        for call in calls:
            call.cancel()
        return beat

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
    while "sleep_in_this_test" not in (tmp_path / "log").read_text() and time.monotonic() < end:
        sleep_in_this_test()
    stacks = (tmp_path / "log").read_text()
    assert "sleep_in_this_test" in stacks
    time.sleep(1.5 * BEAT_S)
    assert (tmp_path / "log").read_text() == stacks, "one request, one answer"


def sleep_in_this_test() -> None:
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
    code = read_programs("heartbeat")["code"]
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    beating, plain = map(float, process.stdout.split())
    assert beating < 5 * plain + 0.02


def run_logged(run_dir: Path, code: str, level: str = "info") -> str:
    """The log of a process that runs this code as "policy rank 1"."""
    with driver_log(run_dir, level) as folder:
        process = subprocess.run(
            [sys.executable, "-c", BEGIN + code, "policy rank 1"], check=False, capture_output=True
        )
    assert (process.stdout, process.stderr) == (b"", b"")
    return build_log_path(folder, "policy rank 1").read_text()


def test_a_record_says_when_how_grave_and_who(tmp_path: Path) -> None:
    code = "import logging; logging.getLogger('megatron_grpo.trainer').info('%d tensors', 7)"
    (line,) = [line for line in run_logged(tmp_path, code).splitlines() if "tensors" in line]
    stamp, rest = line[:23], line[24:]
    assert time.strptime(stamp.partition(",")[0], "%Y-%m-%d %H:%M:%S")
    assert rest == "INFO [policy rank 1] megatron_grpo.trainer: 7 tensors"


@pytest.mark.parametrize(("one_machine", "seconds"), [(True, BEAT_S), (False, SHARED_BEAT_S)])
def test_processes_of_several_machines_write_heartbeats_less_often(
    one_machine: bool, seconds: float, tmp_path: Path
) -> None:
    assert read_beat_s() == BEAT_S
    with driver_log(tmp_path, "info", one_machine=one_machine):
        assert read_beat_s() == seconds
        assert read_log_environment()[BEAT_VARIABLE] == str(seconds), "processes of other machines know it"
    assert BEAT_VARIABLE not in read_log_environment()


def test_what_is_printed_and_warned_is_in_the_log(tmp_path: Path) -> None:
    code = """
print("from Python")
os.system("echo from another program; echo and its errors >&2")
os.write(2, b"from a library in C\\n")
warnings.warn("be careful")
"""
    log = run_logged(tmp_path, code)
    for text in ("from Python", "from another program", "and its errors", "from a library in C"):
        assert text in log
    assert "WARNING [policy rank 1] py.warnings: <string>" in log
    assert "be careful" in log


def test_what_ends_a_process_is_in_its_log(tmp_path: Path) -> None:
    log = run_logged(tmp_path / "raises", "raise ValueError('no such thing')")
    assert "CRITICAL [policy rank 1]" in log
    assert "ValueError: no such thing" in log
    code = "thread = threading.Thread(target=lambda: 1 / 0, name='poller'); thread.start(); thread.join()"
    log = run_logged(tmp_path / "thread", code)
    assert "thread poller ends: uncaught ZeroDivisionError" in log
    log = run_logged(tmp_path / "crashes", "ctypes.string_at(0)")
    assert "Segmentation fault" in log
    assert "string_at" in log


def test_at_debug_level_there_is_a_line_for_each_phase(tmp_path: Path) -> None:
    code = "with phase('train'): time.sleep(0.01)"
    lines = run_logged(tmp_path / "debug", code, level="debug").splitlines()
    assert any(line.endswith("DEBUG [policy rank 1] megatron_grpo.cluster.phases: train: begins") for line in lines)
    (seconds,) = re.findall(r"train: took ([\d.]+)", "\n".join(lines))
    assert float(seconds) >= 0.01
    assert "train" not in run_logged(tmp_path / "info", code)
    assert run_logged(tmp_path / "warning", code, level="warning") == ""


def test_a_phase_that_fails_leaves_its_traceback(tmp_path: Path) -> None:
    """Ray carries an exception to the driver, which says it in one line."""
    code = """
def deep(): raise KeyError("answer")
try:
    with phase("score"): deep()
except KeyError: pass
"""
    log = run_logged(tmp_path, code)
    assert "score: failed after 0.0" in log
    assert "in deep" in log


def test_a_signal_asks_for_the_stacks_whatever_the_process_does(tmp_path: Path) -> None:
    code = """
os.write(1, b"ready\\n")
ctypes.PyDLL(None).sleep(2)  # with the lock of the interpreter
"""
    with driver_log(tmp_path, "info") as folder:
        path = build_log_path(folder, "policy rank 1")
        with subprocess.Popen([sys.executable, "-c", BEGIN + code, "policy rank 1"]) as process:
            while not (path.exists() and "ready" in path.read_text()):
                time.sleep(0.02)
            process.send_signal(signal.SIGUSR1)
            while process.poll() is None and 'File "<string>", line 8 in <module>' not in path.read_text():
                time.sleep(0.02)
            assert 'File "<string>", line 8 in <module>' in path.read_text()
    assert process.returncode == 0, "the signal hurts nobody"


def test_the_driver_leaves_its_process_as_it_found_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment, threads = dict(os.environ), threading.active_count()
    handlers, on_signal = list(logging.getLogger().handlers), signal.getsignal(signal.SIGUSR1)
    with driver_log(tmp_path, "debug") as folder:
        assert read_log_environment()[FOLDER_VARIABLE] == str(folder) == str(tmp_path / "logs")
        assert choose_library_level() == "INFO"
        begin_process_log("policy rank 0")  # a part that runs in the driver, as in tests
        current = find_current_log()
        assert current.name == "driver"
        print("to the terminal")
        warnings.warn("to the log", stacklevel=1)
        with phase("waiting"):
            pass
    assert find_current_log() is None
    assert dict(os.environ) == environment
    assert logging.getLogger().handlers == handlers
    assert signal.getsignal(signal.SIGUSR1) == on_signal
    end = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() == threads
    log = build_log_path(folder, "driver").read_text()
    assert capfd.readouterr().out == "to the terminal\n"
    assert "to the terminal" not in log
    assert "to the log" in log
    assert "waiting: begins" in log


def test_logs_are_kept_and_heartbeats_begin_anew(tmp_path: Path) -> None:
    """A run that is started again may have fewer processes; the ones of before must not look silent."""
    first = run_logged(tmp_path, "print('first start')")
    (tmp_path / "logs" / HEARTBEATS_FOLDER / "policy_rank_7.json").write_text("{}")
    second = run_logged(tmp_path, "print('second start')")
    assert second.startswith(first)
    assert not (tmp_path / "logs" / HEARTBEATS_FOLDER / "policy_rank_7.json").exists()


def test_without_a_driver_nothing_is_logged(tmp_path: Path) -> None:
    assert choose_library_level() == "ERROR"
    process = subprocess.run(
        [sys.executable, "-c", BEGIN + "print('here')", "rank"], check=True, capture_output=True, cwd=tmp_path
    )
    assert process.stdout == b"here\n"
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("megatron_grpo.full")
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  # the log closes it
    with driver_log(tmp_path, "info"):
        current = find_current_log()
        assert isinstance(current.handler, logging.StreamHandler)
        current.handler.stream = current.stream = full
        for number in range(5):
            logger.info("record %d", number)
    assert capsys.readouterr().err == "/dev/full lacks records from now on: [Errno 28] No space left on device\n"


def test_advice_to_developers_is_information_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("some.library")
    library.addFilter(AdviceOnce("deprecated"))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            library.warning("%s IS DEPRECATED", "Model")
            library.warning("something else")
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert sorted(messages) == [("INFO", "Model IS DEPRECATED"), *[("WARNING", "something else")] * 3]
