"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

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
"""Environment variable with the engine's name, which only processes of our engines have."""

SERVER_MARKER = "MEGATRON_GRPO_SERVER"
"""Environment variable that marks the processes of a server of `megatron_grpo.serve`."""

PARENT_CHECK_S = 1.0

_registered = False


def register() -> None:
    """Prepare a process of our engines and servers; idempotent.

    Other processes of vLLM stay unchanged.
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
        from megatron_grpo.generation.cpu_engine import patch_vllm

        patch_vllm()
    else:
        check_hooks("cuda")
    begin_process()


def _describe_role() -> str:
    vllm_name = multiprocessing.current_process().name
    if vllm_name.startswith("EngineCore"):
        return "core"
    if vllm_name.startswith("VllmWorker-"):
        return f"worker {vllm_name.removeprefix('VllmWorker-')}"
    # A process of the Ray executor has no rank yet.
    return f"worker {socket.gethostname()} {os.getpid()}"


def begin_process() -> None:
    """Open the log; end this process when its parent ends.

    Call it in each process of an engine, because a fork does not copy threads.
    """
    begin_process_log(f"{os.environ[ENGINE_MARKER]} {_describe_role()}", lasting_phase="serve")
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="parent-watchdog", daemon=True).start()


def is_parent_gone() -> bool:
    """True once the process that requested this one has ended.

    The fork server in between may still live.
    """
    parent = multiprocessing.parent_process()
    if isinstance(multiprocessing.current_process(), ForkServerProcess):
        return parent is None or not parent.is_alive()
    return parent is not None and parent.pid != os.getppid()


def _exit_with_parent(parent: int) -> None:
    """End this process, however busy, once its parent is gone."""
    # A process started by multiprocessing knows its parent even if the parent is already gone.
    while os.getppid() == parent and not is_parent_gone():
        time.sleep(PARENT_CHECK_S)
    remove_segments(find_shared_files(psutil.Process(), killed=True))
    os._exit(1)
