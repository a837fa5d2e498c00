"""Records the work that a rank's operators would do on a GPU: products, attention, memory traffic, messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

WorkKind = Literal["matmul", "grouped_matmul", "attention", "elementwise", "collective", "send"]


class Work(NamedTuple):
    """Work of an operator; equal operators of a phase are counted together."""

    phase: str
    """Phase of the tracker in which the operator ran."""
    chunk: int | None
    """Number of the model chunk in whose pass of a microbatch the operator ran; None: outside of these passes."""
    is_backward: bool
    """Whether the pass was a backward pass; layers that are computed again in it belong to it."""
    kind: WorkKind
    name: str
    """Name of torch's operator, of a kind of fused kernel, or of a message."""
    flops: float = 0.0
    nbytes: int = 0
    """Bytes read and written; of a message, bytes of its larger side: the gathered, or not yet scattered, tensor."""
    sizes: tuple[int, int, int, int] = (0, 0, 0, 1)
    """m, k, n of a product [m, k] x [k, n], and the number of such products (experts, whose m is the sum)."""
    dtype: str = ""
    """Type of a product's operands: float32, bfloat16, or fp8."""
    ranks: tuple[int, ...] = ()
    """Global ranks that exchange a message; of a send, this rank and the other."""


class WorkLog:
    """Counts the work of operators."""

    # Equal operators are counted, not listed: a step of a large model has millions, and few are distinct.
    def __init__(self) -> None:
        self.counts: Counter[Work] = Counter()
        self.passes: Counter[tuple[str, int]] = Counter()
        """Forward passes of microbatches, by phase and model chunk."""
        self.phase = "other"
        self._chunk: int | None = None
        self._is_backward = False
        self._chunk_of_output: dict[int, int] = {}

    def note(self, kind: WorkKind, name: str, times: int = 1, **sizes: Any) -> None:
        """Count equal operators; `sizes` are fields of `Work`."""
        self.counts[Work(self.phase, self._chunk, self._is_backward, kind, name, **sizes)] += times

    def note_operator(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count an operator, unless it makes a view or an uninitialized tensor."""
        work_class = _CLASSES.get(func)
        if work_class is None:
            work_class = _CLASSES[func] = _classify(func)
        if work_class == "free":
            return
        name = func.name()
        if work_class == "product":
            first, second = [argument for argument in args if isinstance(argument, Tensor)][-2:]
            (*batch, m, k), n = first.shape, second.shape[-1]
            number = math.prod(batch)
            sizes = (number * m, k, n, number)
            flops, moved = 2.0 * number * m * k * n, count_bytes((first, second, result))
            self.note("matmul", name, flops=flops, nbytes=moved, sizes=sizes, dtype=name_of(first.dtype))
        elif work_class == "gather":
            # A gather reads as much as it writes, whatever the size of its source.
            self.note("elementwise", name, nbytes=2 * count_bytes(result))
        else:
            self.note("elementwise", name, nbytes=count_bytes(args) + count_bytes(result))

    def note_writer(self, name: str, args: tuple[Any, ...]) -> None:
        """Count an operator that writes, and may read, its first argument."""
        reads = name not in ("aten::copy_", "aten::zero_", "aten::fill_.Scalar")
        self.note("elementwise", name, nbytes=count_bytes(args) + (count_bytes(args[0]) if reads else 0))

    def note_message(self, name: str, args: tuple[Any, ...]) -> None:
        """Count a message of torch's process groups, `c10d::...`."""
        group = next((argument for argument in args if isinstance(argument, torch.ScriptObject)), None)
        if group is None:
            return  # a wait, or a query of the group
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        short, nbytes = name.removeprefix("c10d::").partition(".")[0], max(map(count_bytes, args))
        if short in ("send", "recv_"):
            peer = next(argument for argument in args if isinstance(argument, int))
            self.note("send", short, nbytes=nbytes, ranks=(dist.get_rank(), ranks[peer]))
        elif len(ranks) > 1:
            self.note("collective", short, nbytes=nbytes, ranks=ranks)

    @contextmanager
    def one_pass(self, chunk: int, *, is_backward: bool) -> Iterator[None]:
        """Make the body one pass of a microbatch through a model chunk."""
        before = self._chunk, self._is_backward
        self._chunk, self._is_backward = chunk, is_backward
        if not is_backward:
            self.passes[self.phase, chunk] += 1
        try:
            yield
        finally:
            self._chunk, self._is_backward = before

    def forward_step(self, original: Any, *args: Any, **named: Any) -> Any:
        """Run Megatron-Core's `schedules.forward_step` as a pass."""
        chunk = named.get("vp_stage") or 0
        with self.one_pass(chunk, is_backward=False):
            result = original(*args, **named)
        # Backward passes are not told their chunk; the output of the forward pass tells which one it is.
        self._chunk_of_output[id(_find_first(result[0]))] = chunk
        return result

    def backward_step(self, original: Any, input_: Any, output: Any, *args: Any, **named: Any) -> Any:
        """Run Megatron-Core's `schedules.backward_step` as a pass."""
        with self.one_pass(self._chunk_of_output.pop(id(_find_first(output))), is_backward=True):
            return original(input_, output, *args, **named)


def _find_first(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


LOG: ContextVar[WorkLog | None] = ContextVar("work log", default=None)
"""The log of the dry run under way."""


def note(kind: WorkKind, name: str, times: int = 1, **sizes: Any) -> None:
    """Count a fused kernel's work in the current dry run, if any."""
    log = LOG.get()
    if log is not None and times:
        log.note(kind, name, times, **sizes)


def note_product(
    name: str, m: int, k: int, n: int, dtype: str, *, number: int = 1, kind: WorkKind = "matmul", width: int = 2
) -> None:
    """Count products [m, k] x [k, n]; m of all together.

    `number`: how many products; `width`: bytes of a number.
    """
    sizes = (m, k, n, number)
    nbytes = width * (m * k + number * k * n + m * n)
    note(kind, name, flops=2.0 * m * k * n, nbytes=nbytes, sizes=sizes, dtype=dtype)


def note_message(name: str, nbytes: int, group: Any) -> None:
    """Count a message of a process group of more than one rank."""
    if group.size() > 1:
        note("collective", name, nbytes=nbytes, ranks=tuple(dist.get_process_group_ranks(group)))


def name_of(dtype: torch.dtype) -> str:
    """Name a type as `Work.dtype` does."""
    return str(dtype).removeprefix("torch.")


def count_bytes(value: Any) -> int:
    """Bytes of the tensors in a nested structure."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


_PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::_unsafe_view",
    "aten::lift_fresh",
    "aten::resize_",
    "prim::",
    "profiler::",
)
_GATHERS = ("aten::embedding", "aten::index.", "aten::index_select", "aten::gather", "aten::masked_select")
_CLASSES: dict[Any, str] = {}
"""Class of each operator that occurred: free, product, gather, or elementwise."""


def _classify(func: Any) -> str:
    name = func.name()
    views = any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns
    )
    if views or name.startswith(_FREE):
        return "free"
    if name in _PRODUCTS:
        return "product"
    return "gather" if name.startswith(_GATHERS) and "backward" not in name else "elementwise"
