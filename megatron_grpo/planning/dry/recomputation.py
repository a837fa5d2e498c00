"""Parts of a layer that are computed again, in a dry run: without Transformer Engine, and counted as they are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from megatron.core.tensor_parallel import random as parts
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from megatron_grpo.planning.dry.tracker import MemoryTracker


class _Fp8State:
    """The state of FP8; a dry run computes nothing in it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _enter_nothing(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _choose_share_storage() -> Callable[[Tensor, Tensor], None]:
    # Megatron-Core moves the bytes of a recomputed tensor into the one that it had freed, by an extension in C++. Here
    # the recomputed tensor keeps them, which the part holds until its backward pass is over.
    return lambda output, recomputed: None


_REPLACED: dict[str, Any] = {
    "FP8GlobalStateManager": _Fp8State,
    "activation_recompute_forward": _enter_nothing,
    "fp8_autocast": _enter_nothing,
    "_get_share_storage": _choose_share_storage,
}
"""By the names of megatron.core.tensor_parallel.random, which takes most of them from Transformer Engine."""


@contextmanager
def recompute_without_bytes(tracker: MemoryTracker) -> Iterator[None]:
    """Recompute parts of layers without Transformer Engine, and count what they free, meanwhile."""
    discard = CheckpointWithoutOutput.discard_output_and_register_recompute

    def discard_and_count(checkpoint: CheckpointWithoutOutput, hook_tensor: Tensor) -> None:
        outputs = checkpoint.outputs
        discard(checkpoint, hook_tensor)
        tracker.count_resized(outputs)

    with ExitStack() as stack:
        for name, value in _REPLACED.items():
            stack.enter_context(patch.object(parts, name, value, create=True))
        replaced = patch.object(CheckpointWithoutOutput, discard.__name__, discard_and_count)
        stack.enter_context(replaced)
        yield
