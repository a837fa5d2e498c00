"""summary.json is written however a run ends, and says why."""

import json
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.cluster.cleanup import interrupt_on_sigterm, keep_sigterm_handler
from megatron_grpo.cluster.wait_notices import WaitNotices
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.observability.summary import RunEnd, write_summary
from megatron_grpo.run.lifetime import Startup, record_end

ROW = {"step": 1, "reward": 0.5, "timing": {"generation": 0.5, "total": 1.0}, "throughput": {}}


def summary(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return figures


def end_run(folder: Path, *, report: bool = False, write: Any = None) -> AbstractContextManager[None]:
    """The end of a run in this folder, of four samples a step; `write` replaces the writer of the summary."""
    startup: Any = SimpleNamespace(
        run_dir=folder,
        write_summary=write or (lambda end: write_summary(folder, samples_per_step=4, end=end)),
    )
    return record_end(startup, report=report)


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (RunError("policy rank 1 died"), "failed", "policy rank 1 died"),
        (ConfigError([Problem("data.path", "is gone")]), "failed", "data.path"),
        (KeyError("answer"), "failed", "KeyError: 'answer'"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (KeyboardInterrupt("SIGTERM"), "interrupted", "SIGTERM"),
        (SystemExit(15), "interrupted", "SIGTERM"),
    ],
    ids=repr,
)
def test_a_start_that_fails_says_why(error: BaseException, outcome: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt if isinstance(error, SystemExit) else type(error)), end_run(tmp_path):
        raise error
    written = summary(tmp_path)
    assert written["outcome"] == outcome
    assert reason in written["reason"]
    assert (written["steps"], written["samples"]) == (0, 0)
    assert written["startup_s"] is written["train_s"] is written["accuracy_after"] is None


def test_the_steps_that_were_made_are_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n" + '{"step": 2, "rew')
    with pytest.raises(RunError), end_run(tmp_path):
        raise RunError("the engine died")
    assert (summary(tmp_path)["steps"], summary(tmp_path)["samples"]) == (1, 4)
    assert summary(tmp_path)["overhead_fraction"] == 0.5


@pytest.mark.parametrize("ending", [None, RunError("the engine died"), KeyboardInterrupt()])
def test_every_end_has_a_report(
    ending: BaseException | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with end_run(tmp_path, report=True):
            (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
            if ending is not None:
                raise ending

    if ending is None:
        run()
    else:
        with pytest.raises(type(ending)):
            run()
    assert f"report in {tmp_path / 'report.html'}\n" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert ("the engine died" in page) == isinstance(ending, RunError), "the summary was there before it"


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    with pytest.raises(RunError, match="the engine died"), end_run(tmp_path, report=True):
        raise RunError("the engine died")
    assert "report.html could not be written" in capsys.readouterr().out


def test_a_folder_without_a_run_gets_no_report(tmp_path: Path) -> None:
    with end_run(tmp_path, report=True):
        pass
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    with end_run(tmp_path):
        pass
    assert not (tmp_path / "report.html").exists()


def test_once_a_run_is_up_its_logger_writes(tmp_path: Path) -> None:
    ends: list[RunEnd] = []
    with pytest.raises(RunError, match="the engine died"), end_run(tmp_path, write=lambda end: ends.append(end)):
        raise RunError("the engine died")
    assert ends == [RunEnd("failed", "the engine died")]


def test_the_summary_of_an_earlier_start_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with end_run(tmp_path):
        assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "summary.json").exists(), "a run that ends well writes it itself"


def test_a_full_disk_does_not_hide_why_a_run_ended(tmp_path: Path) -> None:
    def fail(end: RunEnd) -> None:
        raise OSError("no space left on device")

    with pytest.raises(RunError, match="the engine died"), end_run(tmp_path, write=fail):
        raise RunError("the engine died")


KILLED = """
import sys, time
from pathlib import Path
from megatron_grpo.cluster.cleanup import cleanup_after_kill
from megatron_grpo.observability.summary import make_killed_run_command
with cleanup_after_kill(if_killed=make_killed_run_command(Path(sys.argv[1]), 4, report=True)):
    print("up", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended well"])
def test_a_report_is_written_for_a_driver_that_was_killed(killed: bool, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        if killed:
            driver.kill()
    end = time.monotonic() + (30 if killed else 3)
    while not (tmp_path / "summary.json").exists() and time.monotonic() < end:
        time.sleep(0.1)
    if killed:
        assert summary(tmp_path)["outcome"] == "failed"
        assert "the driver was killed" in summary(tmp_path)["reason"]
        assert summary(tmp_path)["steps"] == 1
        while not (tmp_path / "report.html").exists() and time.monotonic() < end:
            time.sleep(0.1)
        assert "the driver was killed" in (tmp_path / "report.html").read_text()
    else:
        assert not (tmp_path / "summary.json").exists()


def test_sigterm_interrupts_whatever_a_library_made_of_it() -> None:
    with interrupt_on_sigterm():
        with keep_sigterm_handler():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


def test_each_part_of_a_start_is_told_as_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    made_up: Any = None
    startup = Startup(Path(), *[made_up] * 6, began=0.0)
    with startup.part("ray"):
        assert capsys.readouterr().out == "starting Ray\n"
    with startup.part("refit"), startup.part("waiting"):
        pass
    with startup.part("refit"):
        pass
    assert capsys.readouterr().out == "sending the weights to the engines\nwaiting for models and engines\n"


def test_a_long_part_of_a_start_is_named() -> None:
    made_up: Any = None
    lines: list[str] = []
    notices = WaitNotices(lines.append, first_s=0.05)
    startup = Startup(Path(), *[made_up] * 6, began=0.0, notices=notices)
    deadline = time.monotonic() + 10
    with startup.part("ray"):
        lines.clear()
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
    notices.close()
    assert lines[0].endswith("s so far, in starting Ray")
