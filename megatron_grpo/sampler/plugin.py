"""What every vLLM process of ours loads at start (entry point of the group `vllm.general_plugins`)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from megatron_grpo.cluster.process_log import OncePerMessage, begin_process_log
from megatron_grpo.platform.hooks import check_hooks

QUEUE_SEGMENTS = "/dev/shm/psm_"
"""How Python names the segments that vLLM's queues live in; the rest of the name is random."""


def queue_segments(process: psutil.Process) -> set[Path]:
    """Files of the queue segments that a process has mapped; empty when the process is gone."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {Path(line.split()[-1]) for line in maps.splitlines() if QUEUE_SEGMENTS in line and "(deleted)" not in line}


def free(segments: Iterable[Path]) -> None:
    """Remove the files; the memory goes with the last process that has it mapped."""
    for segment in segments:
        segment.unlink(missing_ok=True)


ENGINE_MARKER = "MEGATRON_GRPO_ENGINE"
"""Environment variable in which our engine actor tells its processes its name; other users of vLLM are left alone."""

SERVER_MARKER = "MEGATRON_GRPO_SERVER"
"""Environment variable that tells the processes of a server of `megatron_grpo.serve` what they are."""

PARENT_CHECK_S = 1.0


_registered = False


def register() -> None:
    """Tie the process to its parent. Does nothing outside our engines; safe to repeat."""
    global _registered
    if _registered or not {ENGINE_MARKER, SERVER_MARKER} & os.environ.keys():
        return
    _registered = True
    # Of layers without weights of their own, a tied head for one, it warns at every refit.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(OncePerMessage())
    if ENGINE_MARKER not in os.environ:  # a server's processes are vLLM's own in everything else
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from megatron_grpo.cpu.engine import replace_in_vllm

        replace_in_vllm()
    else:
        check_hooks("cuda")
    begin_process()


def _role() -> str:
    """What this process is to its engine; one that a Ray executor placed learns its rank only later."""
    vllm_name = multiprocessing.current_process().name
    if vllm_name.startswith("EngineCore"):
        return "core"
    if vllm_name.startswith("VllmWorker-"):
        return f"worker {vllm_name.removeprefix('VllmWorker-')}"
    return f"worker {socket.gethostname()} {os.getpid()}"


def begin_process() -> None:
    """Give this process its log, and end it when its parent is gone.

    To be called in each process of an engine: a fork takes no threads along.
    """
    begin_process_log(f"{os.environ[ENGINE_MARKER]} {_role()}", lasting_phase="serve")
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="parent-watchdog", daemon=True).start()


def parent_is_gone() -> bool:
    """Whether the process that asked for this one has ended; the fork server in between may live on."""
    parent = multiprocessing.parent_process()
    if isinstance(multiprocessing.current_process(), ForkServerProcess):
        return parent is None or not parent.is_alive()
    return parent is not None and parent.pid != os.getppid()


def _exit_with_parent(parent: int) -> None:
    """End this process, however busy it is, when its parent is gone: the driver was killed, so nobody needs it."""
    # A process that multiprocessing started knows who its parent was even if that one is gone already.
    while os.getppid() == parent and not parent_is_gone():
        time.sleep(PARENT_CHECK_S)
    free(queue_segments(psutil.Process()))
    os._exit(1)
