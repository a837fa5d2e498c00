"""No console ends a run: one that cannot encode a text, a pipe that nobody reads, a stream that was closed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_grpo.config.command_line import MISTAKE, as_command
from megatron_grpo.config.output import TolerantStream, tolerant_output
from megatron_grpo.observability.progress import ProgressDisplay
from megatron_grpo.run.lifetime import record_end

TEXT = "日本 → ½ 😀 \u2028 é"
ODD = "half a pair: \ud83d"


def open_stream(encoding: str) -> tuple[io.TextIOWrapper, Callable[[], str]]:
    """A text stream of an encoding, and a function that returns what it has got."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)

    def written() -> str:
        stream.flush()
        return raw.getvalue().decode(encoding)

    return stream, written


def escape(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "utf-16", "shift_jis"])
@pytest.mark.parametrize("text", [TEXT, ODD, "plain"])
def test_what_an_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str, text: str) -> None:
    stream, written = open_stream(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with tolerant_output(of_run=True):
        print(text)
    assert sys.stdout is stream
    assert written() == escape(text, encoding) + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_samples_that_a_console_cannot_encode_are_shown(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    stream, written = open_stream(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    progress = ProgressDisplay(3, live=True)
    progress.print_line(f"  {TEXT!r} -> {ODD!r}")
    progress.close()
    assert escape(f"  {TEXT!r} -> {ODD!r}\n", encoding) in written()


@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_the_end_of_a_run_raises_only_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    folder = tmp_path / "läuft→"
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\n")
    stream, written = open_stream("ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    startup: Any = SimpleNamespace(run_dir=folder, write_summary=lambda end: None)

    def run() -> None:
        with record_end(startup, report=True):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(KeyError):
            run()
    assert f"report in {escape(str(folder), 'ascii')}" in written()


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("of_run", [True, False])
def test_a_pipe_that_nobody_reads(monkeypatch: pytest.MonkeyPatch, of_run: bool) -> None:
    stream = broken_pipe()
    monkeypatch.setattr(sys, "stdout", stream)
    with tolerant_output(of_run=of_run):
        for _ in range(9):
            print("x" * 5000, flush=True)
    stream.close()  # nothing is left that would fail when Python ends


def test_a_closed_stream_and_a_full_disk_end_no_run_but_fail_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with tolerant_output(of_run=True):
        print("lost")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with tolerant_output(of_run=True):
            print("lost", flush=True)
            print("lost", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)

        @as_command("x", "")
        def main(_: Sequence[str]) -> int:
            print("lost", flush=True)
            return 0

        with pytest.raises(OSError, match="No space left"):
            main([])
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_stream_that_was_closed_before_python_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with tolerant_output():
        print("nowhere")
    assert sys.stdout is None


def test_the_rest_of_a_stream_is_its_own() -> None:
    stream, _ = open_stream("latin-1")
    tolerant = TolerantStream(stream, ignores=(OSError,))
    assert (tolerant.encoding, tolerant.isatty(), tolerant.buffer) == ("latin-1", False, stream.buffer)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_the_command_line_prints_everything(tmp_path: Path, encoding: str) -> None:
    command = [sys.executable, "-m", "megatron_grpo.train", "--cfg", "job", "+exp=quickstart", f"run_dir={tmp_path}/→"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    process = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert yaml.safe_load(process.stdout)["run_dir"] == f"{tmp_path}/\\u2192"


def test_a_command_whose_reader_is_gone_says_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megatron_grpo.train", "--help"]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (0, b"")
    process = subprocess.run(
        [sys.executable, "-m", "megatron_grpo.report", f"{tmp_path}/→"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert process.returncode == MISTAKE
    assert b"Traceback" not in process.stderr
