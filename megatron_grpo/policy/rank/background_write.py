"""A rank's part of a checkpoint that a process of its own writes, while the rank goes on."""

from __future__ import annotations

import logging
import multiprocessing
from multiprocessing.context import ForkProcess

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

logger = logging.getLogger(__name__)


class BackgroundWrite:
    """Writes what the rank held when this was made: forking keeps tensors of the host as they were, and those of a GPU
    are copied to the host first.

    Args:
        request: what Megatron-Core's asynchronous save has left to do.
    """

    def __init__(self, request: AsyncRequest) -> None:
        self._finishing = request.finalize_fns
        self._process: ForkProcess | None = None
        if request.async_fn is None:
            return
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()  # the buckets to write, on the host
        self._process = multiprocessing.get_context("fork").Process(
            target=request.async_fn, args=arguments, kwargs=request.async_fn_kwargs
        )
        self._process.start()
        logger.info("process %d writes this rank's part of the checkpoint", self._process.pid)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, well or not."""
        return self._process is None or not self._process.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, and write what makes their files a checkpoint; collective over all ranks.

        Raises:
            CheckpointException: a rank could not write its part, or its process was killed.
        """
        if self._process is not None:
            # The driver's deadline for completing the checkpoint names the ranks whose writers are late.
            self._process.join()
            logger.info(
                "process %d, the checkpoint's writer, ended with code %s", self._process.pid, self._process.exitcode
            )
        dist.barrier()
        for finish in self._finishing:
            finish()
