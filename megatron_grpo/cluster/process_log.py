"""Logs: a file per process under run_dir/logs, and its heartbeat.

The driver opens its log with `driver_log`, before Ray is started; every other process first calls `begin_process_log`
with its name. The folder comes from an environment variable that Ray's workers and vLLM's processes inherit.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from megatron_grpo.cluster import heartbeat as beats
from megatron_grpo.cluster.phases import THIS_PROCESS
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.outside_files import open_to_append
from megatron_grpo.config.outside_text import format_record, replace_controls

LOGS_FOLDER = "logs"  # folder of the logs, inside the folder of the run
# Names of processes, in messages and of log files.
DRIVER = "driver"
ENGINE_NAME = "generation engine {}".format
RANK_NAME = "policy rank {}".format
WORKER_NAME = "rollout worker {}".format
# Environment variables with the folder of logs and the log level, for the driver's processes.
FOLDER_VARIABLE = "MEGATRON_GRPO_LOGS"
LEVEL_VARIABLE = "MEGATRON_GRPO_LOG_LEVEL"
PACKAGE = "megatron_grpo"
LOG_FORMAT = "%(asctime)s %(levelname)s [{process}] %(name)s: %(message)s"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessLog:
    """The open log of a process."""

    folder: Path  # of the logs of all processes
    name: str  # of the process, like "policy rank 0"
    pid: int
    stream: TextIO
    handler: logging.Handler
    heartbeat: beats.HeartbeatWriter


_current: ProcessLog | None = None


def find_current_log() -> ProcessLog | None:
    """Find the log of the calling process, if it has one."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def build_log_path(folder: Path, name: str) -> Path:
    """Build the path of the log of a process, like "policy rank 0"."""
    return folder / f"{beats.build_file_stem(name)}.log"


def choose_library_level() -> str:
    """Choose the log level of vLLM and other libraries."""
    level = os.environ.get(LEVEL_VARIABLE, "error").upper()
    return "INFO" if level == "DEBUG" else level  # their debug level writes too much


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records to a log; prints a line at the first failure."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not self._has_warned:
            self._has_warned = True
            print(f"{self.stream.name} lacks records from now on: {sys.exc_info()[1]}", file=sys.stderr)


class RecordFormatter(logging.Formatter):
    """Formats records, whose texts may steer a terminal or have a password."""

    def format(self, record: logging.LogRecord) -> str:
        return format_record(hide_secrets(super().format(record)))


class PrintedText:
    """Writes what user code prints to a log.

    It is indented, so that no line passes for a record, and steers no terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begins_line = stream, True

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        for line in replace_controls(text).splitlines(keepends=True):
            self._stream.write(f"    {line}" if self._begins_line else line)
            self._begins_line = line.endswith("\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class OncePerMessage(logging.Filter):
    """Passes each message of a logger once."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        count = len(self._messages)
        self._messages.add(record.getMessage())
        return len(self._messages) > count


class AdviceOnce(OncePerMessage):
    """Passes a library's advice to its callers once, as information.

    The advice is for programmers of callers: users of a run cannot follow it.
    """

    def __init__(self, *phrases: str) -> None:
        super().__init__()
        self._phrases = phrases  # in lower case

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage().lower()
        if not any(phrase in message for phrase in self._phrases):
            return True
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return super().filter(record)


def read_log_environment() -> dict[str, str]:
    """Read the environment variables of logs, for processes elsewhere."""
    names = (FOLDER_VARIABLE, LEVEL_VARIABLE, beats.BEAT_VARIABLE)
    return {name: os.environ[name] for name in names if name in os.environ}


@contextmanager
def driver_log(run_dir: Path, level: str, *, one_machine: bool = True) -> Iterator[Path]:
    """Log the driver and its processes during the body; yields the logs' folder.

    With `one_machine` all processes are on this machine, where heartbeats cost nothing.
    """
    global _current
    folder = run_dir.absolute() / LOGS_FOLDER
    for heartbeat in (folder / beats.HEARTBEATS_FOLDER).glob("*"):  # an earlier start may have had more processes
        heartbeat.unlink(missing_ok=True)
    before = read_log_environment()
    os.environ |= {FOLDER_VARIABLE: str(folder), LEVEL_VARIABLE: level}
    os.environ[beats.BEAT_VARIABLE] = str(beats.BEAT_S if one_machine else beats.SHARED_BEAT_S)
    _current = log = _open(folder, DRIVER, level)
    logger.info("the driver begins: pid %d, %s", log.pid, " ".join(sys.argv))
    try:
        yield folder
    finally:
        logger.info("the driver ends")
        log.heartbeat.stop()
        faulthandler.unregister(signal.SIGUSR1)
        logging.captureWarnings(False)
        logging.getLogger(PACKAGE).setLevel(logging.NOTSET)
        logging.getLogger().removeHandler(log.handler)
        with suppress(OSError):  # records that a full disk has not taken
            log.stream.close()
        _current = None
        for name in read_log_environment():
            del os.environ[name]
        os.environ |= before


def begin_process_log(name: str, lasting_phase: str | None = None) -> None:
    """Log this process until it ends, its output and errors included.

    Does nothing without a log folder in the environment, or if the process already has a log. `lasting_phase`: phase of
    a process that never waits for work; None: it waits for work between phases.
    """
    global _current
    if FOLDER_VARIABLE not in os.environ or find_current_log() is not None:
        return
    if _current is not None:  # inherited in a fork
        logging.getLogger().removeHandler(_current.handler)
    _current = log = _open(Path(os.environ[FOLDER_VARIABLE]), name, os.environ[LEVEL_VARIABLE])
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):  # a reward function may print any text
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        os.dup2(log.stream.fileno(), descriptor)  # also for output of C code; Ray's own files are hard to find
    sys.stdout = cast(TextIO, PrintedText(sys.stdout))
    faulthandler.enable(file=log.stream)
    sys.excepthook = lambda kind, error, _: logger.critical(
        "the process ends: uncaught %s", kind.__name__, exc_info=error
    )
    threading.excepthook = _log_uncaught_in_thread
    logger.info("%s begins: pid %d", name, log.pid)
    if lasting_phase is not None:
        THIS_PROCESS.enter(lasting_phase)


def _open(folder: Path, name: str, level: str) -> ProcessLog:
    path = build_log_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = open_to_append(path)
    handler = LogHandler(stream)
    handler.setFormatter(RecordFormatter(LOG_FORMAT.format(process=name.replace("%", "%%"))))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger(PACKAGE).setLevel(level.upper())
    logging.captureWarnings(True)
    # The handler is in C, so kill -USR1 PID works even while the interpreter is held.
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    heartbeat = beats.HeartbeatWriter(folder / beats.HEARTBEATS_FOLDER, name, stream)
    heartbeat.start()
    return ProcessLog(folder=folder, name=name, pid=os.getpid(), stream=stream, handler=handler, heartbeat=heartbeat)


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    name, error = arguments.thread.name if arguments.thread is not None else "a thread", arguments.exc_value
    if error is not None and not isinstance(error, SystemExit):
        logger.error("thread %s ends: uncaught %s", name, type(error).__name__, exc_info=error)
