"""What takes the place of kernels whose results decide the course of a computation, and a record of host waits.

Kernels do nothing on the stand-in device, so the memory that they should have written has any content. That matters
where a number of the device becomes a size or a condition of the host, and where a kernel waits for another one. Fused
attention is cuDNN's, which refuses the device; its *choice* by Transformer Engine runs for real and is recorded.
"""

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch.attention.dot_product_attention.utils as selection
import transformer_engine_torch as tex
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

from megatron_grpo.planning.dry import kernels as dry

SELECTIONS: list[Any] = []
"""The parameters of every choice of an attention kernel, and whether the fused one was chosen."""


def replace() -> None:
    """Replace the kernels of fused attention and delta nets for this process, and cuDNN's in torch."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    selection._get_fused_attn_backend = _fused_backend
    choose = selection.get_attention_backend

    def recorded(parameters: Any) -> Any:
        chosen = choose(parameters)
        SELECTIONS.append((parameters, bool(chosen[2])))
        return chosen

    selection.get_attention_backend = recorded
    # Those of delta nets are compiled for a device when they are first used.
    common.l2norm, gdn.causal_conv1d = dry._run_vector_norm, dry._run_convolution
    gdn.chunk_gated_delta_rule = dry._run_delta_rule
    tex.fused_attn_fwd, tex.fused_attn_bwd = _attention, _attention_backward


def _fused_backend(**parameters: Any) -> tuple[int, str]:
    """cuDNN's answer for an H100: it has 16-bit attention for any layout."""
    wide = any("32" in str(value) for name, value in parameters.items() if "type" in name)
    if wide:
        return int(FusedAttnBackend.No_Backend), "16 bits only"
    return int(FusedAttnBackend.F16_arbitrary_seqlen), ""


def _attention(*arguments: Any) -> list[Tensor]:
    """Output, softmax statistics and random state of Transformer Engine's fused attention."""
    ends, query, value = arguments[14], arguments[16], arguments[18]
    assert query.is_cuda, "queries on the host"
    assert ends.is_cuda, "boundaries on the host"
    statistics = query.new_empty(*query.shape[:-1], 1, dtype=torch.float32)
    return [query.new_empty(*query.shape[:-1], value.shape[-1]), statistics, query.new_empty(2, dtype=torch.int64)]


def _attention_backward(*arguments: Any) -> list[Tensor | None]:
    """Gradients of queries, keys and values."""
    return [*(torch.empty_like(argument) for argument in arguments[19:22]), None, None]


def host_waits() -> int:
    """Number of times that the host has waited for the device so far, as the stand-in runtime has counted."""
    library = ctypes.CDLL(None)
    names = ("stream_waits", "device_waits", "event_waits", "copies_to_host")
    return sum(ctypes.c_long.in_dll(library, f"null_{name}").value for name in names)


class Answers(TorchDispatchMode):
    """Answers operations whose result is a number on the host or a size, and skips kernels that wait for others.

    Args:
        top_k: experts of a token, which says how many rows a masked selection has.
    """

    def __init__(self, top_k: int = 0) -> None:
        super().__init__()
        self.top_k = top_k
        self.waits: Counter[tuple[str, str]] = Counter()
        """Number of waits by operation and by the place in our code or in Megatron-Core's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func.name())
        if answer is None or not any(isinstance(argument, Tensor) and argument.is_cuda for argument in args):
            return func(*args, **(kwargs or {}))
        return answer(self, *args, **(kwargs or {}))

    def waited(self, wait: str) -> None:
        """Record a wait of the host."""
        self.waits[wait, _locate_call()] += 1


def _locate_call() -> str:
    """The innermost line of ours, or else of Megatron-Core's or Transformer Engine's, that is being run."""
    frames = [frame for frame in traceback.extract_stack() if "tests/cuda" not in frame.filename]
    for part in ("megatron_grpo/", "megatron/core/", "transformer_engine/"):
        inside = [frame for frame in frames if part in frame.filename]
        if inside:
            return f"{part}{inside[-1].filename.rpartition(part)[2]}:{inside[-1].lineno}"
    return "elsewhere"


def _number(mode: Answers, tensor: Tensor) -> bool | float | int:
    mode.waited("number")
    if tensor.dtype == torch.bool or tensor.is_floating_point():
        return True if tensor.dtype == torch.bool else 1.0
    return torch.ops.aten._local_scalar_dense(tensor)  # counts come from the host, and have the right content


def _on_host(mode: Answers, tensor: Tensor, **options: Any) -> Tensor:
    """A copy of a tensor; floating-point numbers that come to the host are all 1."""
    copied: Tensor = torch.ops.aten._to_copy(tensor, **options)
    if copied.is_cuda:
        return copied
    mode.waited("copy to the host")
    return copied.fill_(1) if copied.is_floating_point() else copied


def _select(mode: Answers, tensor: Tensor, mask: Tensor) -> Tensor:
    mode.waited("masked_select")
    return tensor.new_empty(mask.shape[-1] * mode.top_k)


def _index(mode: Answers, tensor: Tensor, indices: Any) -> Tensor:
    mask = next((index for index in indices if index is not None and index.dtype == torch.bool), None)
    if mask is None:
        return torch.ops.aten.index.Tensor(tensor, indices)
    mode.waited("boolean index")
    return tensor.new_empty(mask.numel(), *tensor.shape[mask.dim() :])


def _nonzero(mode: Answers, tensor: Tensor) -> Tensor:
    mode.waited("nonzero")
    return tensor.new_zeros(tensor.numel(), tensor.dim(), dtype=torch.int64)


def _copy_like(mode: Answers, tensor: Tensor, *rest: Any) -> Tensor:
    return tensor


def _copy(mode: Answers, tensor: Tensor, *rest: Any) -> Tensor:
    return tensor.clone()


def _sum(mode: Answers, tensor: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(tensor, dtype=None if tensor.is_floating_point() else torch.int64)


def _order(mode: Answers, tensor: Tensor, *rest: Any, **settings: Any) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.int64)


def _sort(mode: Answers, tensor: Tensor, *rest: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    return tensor.clone(), torch.zeros_like(tensor, dtype=torch.int64)


def _embedding_gradient(mode: Answers, gradient: Tensor, indices: Tensor, rows: int, *rest: Any) -> Tensor:
    return gradient.new_empty(rows, gradient.shape[-1])


_ANSWERS: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": _number,
    "aten::_to_copy": _on_host,
    "aten::masked_select": _select,
    "aten::index.Tensor": _index,
    "aten::nonzero": _nonzero,
    # Sums, sorts and scatters wait within the kernel for what other blocks have written.
    "aten::cumsum": _sum,
    "aten::cumsum_": _copy_like,
    "aten::argsort": _order,
    "aten::sort": _sort,
    "aten::sort.stable": _sort,
    "aten::index_put": _copy,
    "aten::index_put_": _copy_like,
    "aten::_index_put_impl_": _copy_like,
    "aten::masked_scatter": _copy,
    "aten::embedding_dense_backward": _embedding_gradient,
}
