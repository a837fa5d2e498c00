"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`): log, tokenizer, end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import Future
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_grpo.batch.special_tokens import list_added_tokens
from megatron_grpo.cluster.cleanup import find_shared_files, remove_segments
from megatron_grpo.cluster.machines import prepare_network
from megatron_grpo.cluster.phases import SERVE
from megatron_grpo.cluster.process_log import OncePerMessage, begin_process_log
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.tokenizer import find_difference, load_tokenizer, make_sample_texts
from megatron_grpo.platform.hooks import check_hooks

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

# Environment variables that mark vLLM's processes: those of an engine of ours, by its name, and those of a server
# (`megatron_grpo.serve`).
ENGINE_MARKER = "MEGATRON_GRPO_ENGINE"
SERVER_MARKER = "MEGATRON_GRPO_SERVER"

PARENT_CHECK_S = 1.0

# Longest sleep of a reader of vLLM's queues, whose default is 5 s: a wake-up is lost when two messages come within a
# millisecond of each other after a pause.
RECHECK_MS = 50

_registered = False


def register() -> None:
    """Prepare a process of our engines and servers, but no other; idempotent.

    All of them load the run's tokenizer. In an engine's process, further parts of vLLM are replaced (CPU) or checked
    (CUDA), the log is opened, and a thread ends the process when its parent is gone.
    """
    global _registered
    if _registered or not {ENGINE_MARKER, SERVER_MARKER} & os.environ.keys():
        return
    _registered = True
    # vLLM warns at every refit about layers without weights of their own, such as a tied head.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(OncePerMessage())
    from vllm.tokenizers.registry import TokenizerRegistry

    TokenizerRegistry.tokenizers["hf"] = (EngineTokenizer.__module__, EngineTokenizer.__name__)
    from vllm.platforms import current_platform

    if ENGINE_MARKER not in os.environ:  # a server's processes are otherwise unchanged vLLM
        if current_platform.is_cpu():
            from megatron_grpo.generation.cpu_engine import accept_recorder

            accept_recorder()
        return
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = keep_images
    if current_platform.is_cpu():
        from megatron_grpo.generation.cpu_engine import patch_vllm

        patch_vllm()
    else:
        from vllm.distributed.device_communicators import shm_broadcast

        check_hooks("cuda")
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
        if _is_core():
            from vllm.v1.engine.core import EngineCore

            EngineCore.wake_paused = wake_paused
    begin_process()


def keep_images(features: list[Any], *_: Any, **__: Any) -> list[Any]:
    """Give a request's images whole to the model's processes.

    vLLM leaves out the pixels of images that the prefix cache has. A request whose cache is given up, for new weights
    or for want of room, is computed anew from these images, and its engine would end.
    """
    return features


def _is_core() -> bool:
    return multiprocessing.current_process().name.startswith("EngineCore")


def wake_paused(core: EngineCore, tags: list[str]) -> Future[Any] | None:
    """Take back memory, and leave the scheduler paused; a method of vLLM's core.

    vLLM resumes the scheduler once all memory is back. The core handles a call between two forward passes, so none
    comes between the two parts of this one.
    """
    core.wake_up(tags)
    return core.pause_scheduler(mode="keep", clear_cache=False)


def begin_process() -> None:
    """Open the log; end this process when its parent ends."""
    # Each process of an engine calls this, because a fork does not copy threads.
    vllm_name = multiprocessing.current_process().name
    role = f"worker {vllm_name.removeprefix('VllmWorker-')}"
    if _is_core():
        role = "core"
    elif not vllm_name.startswith("VllmWorker-"):  # a process of the Ray executor has no rank yet
        role = f"worker {socket.gethostname()} {os.getpid()}"
        # Imported here, because other workers, which inherit the engine's environment, do without Ray.
        from megatron_grpo.cluster.ray_cluster import find_node_address

        prepare_network(find_node_address())
    begin_process_log(f"{os.environ[ENGINE_MARKER]} {role}", lasting_phase=SERVE)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="parent-watchdog", daemon=True).start()


def is_parent_gone() -> bool:
    # The parent is the process that requested this one; the fork server in between may still live.
    parent = multiprocessing.parent_process()
    if isinstance(multiprocessing.current_process(), ForkServerProcess):
        return parent is None or not parent.is_alive()
    return parent is not None and parent.pid != os.getppid()


def _exit_with_parent(parent: int) -> None:
    # A process started by multiprocessing knows its parent even if the parent is already gone.
    while os.getppid() == parent and not is_parent_gone():
        time.sleep(PARENT_CHECK_S)
    remove_segments(find_shared_files(psutil.Process(), with_semaphores=True))
    os._exit(1)  # however busy the other threads are


load_engine_tokenizer = cache(load_tokenizer)


class EngineTokenizer:
    """Loads the run's tokenizer where vLLM would load its own."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, *_: Any, **options: Any) -> Any:
        from vllm.tokenizers.hf import get_cached_tokenizer

        tokenizer = get_cached_tokenizer(load_engine_tokenizer(str(folder)))  # a shallow copy, with vLLM's properties
        # Of vLLM's arguments for transformers, only the side of truncation has a meaning here.
        tokenizer.truncation_side = options.get("truncation_side", tokenizer.truncation_side)
        return tokenizer


def require_same_tokenizer(served: Any, tokenizer: Any) -> None:
    """Raise RunError unless vLLM has the run's tokenizer."""
    difference = find_difference(served, tokenizer, make_sample_texts(list_added_tokens(tokenizer)))
    if difference is not None:
        raise RunError(
            f"the installed vLLM has another tokenizer ({type(served).__name__}) for this model than the run, so that "
            f"stop strings and structured output would fail: {difference}"
        )
