"""Processes with a log of their own, as a run's are, in whatever state a test wants to find them."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, Heartbeat, read_heartbeats

BEGIN = """
import ctypes, os, sys, threading, time, warnings
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
begin_process_log(sys.argv[1])
"""
SLEEPS = BEGIN + "with phase('train'): time.sleep(300)"
WAITS_FOR_WORK = BEGIN + "time.sleep(300)"
HOLDS_THE_INTERPRETER = BEGIN + "with phase('train'): ctypes.PyDLL(None).sleep(300)"
"""PyDLL, unlike CDLL, keeps the lock of the interpreter while C code runs."""


@contextmanager
def logged_process(name: str, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs this code under this name, inside the body of a `driver_log`; killed in the end."""
    with subprocess.Popen([sys.executable, "-c", code, name]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def logged_processes(folder: Path, codes: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Several, by name; returns when each has a heartbeat and those that enter the phase "train" have.

    Args:
        folder: where the logs of all processes lie.
        codes: by name of the process.
    """
    with ExitStack() as stack:
        processes = {name: stack.enter_context(logged_process(name, code)) for name, code in codes.items()}
        wait_for(folder, lambda beats: all(_up(beats.get(name), code) for name, code in codes.items()))
        yield processes


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until it is."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def _up(beat: Heartbeat | None, code: str) -> bool:
    return beat is not None and ("phase('train')" not in code or bool(beat.phases))


def wait_for(folder: Path, condition, timeout_s: float = 30.0) -> dict[str, Heartbeat]:  # type: ignore[no-untyped-def]
    """The heartbeats in the folder of the logs, once they fulfil the condition."""
    end = time.monotonic() + timeout_s
    while not condition(beats := read_heartbeats(folder / HEARTBEATS_FOLDER)):
        assert time.monotonic() < end, beats
        time.sleep(0.05)
    return beats
