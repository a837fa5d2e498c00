"""The plugin that vLLM loads in each of its processes (entry point in `vllm.general_plugins`); it prepares ours."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.context import ForkServerProcess

import psutil

from megatron_grpo.cluster.cleanup import find_shared_files, remove_segments
from megatron_grpo.cluster.process_log import OncePerMessage, begin_process_log
from megatron_grpo.generation.engine_tokenizer import replace_tokenizer_in_vllm
from megatron_grpo.platform.hooks import check_hooks

ENGINE_MARKER = "MEGATRON_GRPO_ENGINE"
"""Environment variable by which our engine actor gives its name to its processes; other uses of vLLM lack it."""

SERVER_MARKER = "MEGATRON_GRPO_SERVER"
"""Environment variable that marks the processes of a server of `megatron_grpo.serve`."""

PARENT_CHECK_S = 1.0


_registered = False


def register() -> None:
    """Prepare a process of our engines and servers; does nothing in other processes of vLLM; idempotent.

    All of them load the run's tokenizer. In an engine's process, further parts of vLLM are replaced (CPU) or checked
    (CUDA), the log is opened, and a thread ends the process when its parent is gone.
    """
    global _registered
    if _registered or not {ENGINE_MARKER, SERVER_MARKER} & os.environ.keys():
        return
    _registered = True
    # vLLM warns at every refit about layers without weights of their own, such as a tied head.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(OncePerMessage())
    replace_tokenizer_in_vllm()
    if ENGINE_MARKER not in os.environ:  # a server's processes are otherwise unchanged vLLM
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from megatron_grpo.generation.cpu_engine import replace_in_vllm

        replace_in_vllm()
    else:
        check_hooks("cuda")
    begin_process()


def _role() -> str:
    """Role of this process in its engine; a process of the Ray executor, which has no rank yet, gets host and pid."""
    vllm_name = multiprocessing.current_process().name
    if vllm_name.startswith("EngineCore"):
        return "core"
    if vllm_name.startswith("VllmWorker-"):
        return f"worker {vllm_name.removeprefix('VllmWorker-')}"
    return f"worker {socket.gethostname()} {os.getpid()}"


def begin_process() -> None:
    """Open this process's log, and start the thread that ends it when its parent is gone.

    Must be called in each process of an engine, because a fork does not copy threads.
    """
    begin_process_log(f"{os.environ[ENGINE_MARKER]} {_role()}", lasting_phase="serve")
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="parent-watchdog", daemon=True).start()


def parent_is_gone() -> bool:
    """Whether the process that requested this one has ended; the fork server in between may still live."""
    parent = multiprocessing.parent_process()
    if isinstance(multiprocessing.current_process(), ForkServerProcess):
        return parent is None or not parent.is_alive()
    return parent is not None and parent.pid != os.getppid()


def _exit_with_parent(parent: int) -> None:
    """End this process, however busy, when its parent is gone, for example because the driver was killed."""
    # A process started by multiprocessing knows its parent even if the parent is already gone.
    while os.getppid() == parent and not parent_is_gone():
        time.sleep(PARENT_CHECK_S)
    remove_segments(find_shared_files(psutil.Process(), killed=True))
    os._exit(1)
