"""Patches with which Megatron-Core 0.19, made for CUDA, runs on CPUs.

Most of what Megatron-Core assumes is a name it looks up in `torch` or `torch.cuda`. Instead of changing torch for the
whole process, each module listed in CUDA_MODULES gets its own `torch`: the real names, except for the few that need a
GPU. Looking up a name there takes tens of nanoseconds longer; operators are not intercepted at all.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.platform.adamw_state import patch_state_of_adamw
from megatron_grpo.platform.hooks import check_hooks, load_hooks

# Functions of `torch` that Megatron-Core calls with device="cuda".
FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")

# Typed loosely, because names of the modules are replaced.
_import_module: Callable[[str], Any] = importlib.import_module


def _skip(*args: Any, **kwargs: Any) -> None: ...


class _Stream:
    """Replaces torch.cuda.Stream and Event: CPUs finish work before a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True

    wait_stream = wait_event = record = wait = synchronize = _skip


class _Overlay(ModuleType):
    """A module with some names replaced; its lazy imports still work."""

    def __init__(self, original: ModuleType, **replaced: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update({**vars(original), **replaced})
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def build_cpu_torch() -> ModuleType:
    """Build a `torch` in which some names of CUDA use the CPU."""
    stream = _Stream()
    cuda = _Overlay(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=_skip,
        empty_cache=_skip,
        Stream=_Stream,
        Event=_Stream,
        stream=contextlib.nullcontext,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    return _Overlay(torch, cuda=cuda, **{name: _wrap_factory(getattr(torch, name)) for name in FACTORIES})


def _wrap_factory(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def create(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _allow_uneven_parts() -> None:
    # gloo has equal parts only, so ranks sum tensors of full size, zero outside their own part.
    mappings = _import_module("megatron.core.tensor_parallel.mappings")
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(input_: Tensor, group: Any, output_split_sizes: Any = None, *rest: Any, **keywords: Any) -> Any:
        if output_split_sizes is None or group.size() == 1 or dist.get_backend(group) != "gloo":
            return gather(input_, group, output_split_sizes, *rest, **keywords)
        gathered = input_.new_zeros(sum(output_split_sizes), *input_.shape[1:])
        gathered.split(list(output_split_sizes))[group.rank()].copy_(input_)
        dist.all_reduce(gathered, group=group)
        return gathered

    def scatter_parts(input_: Tensor, group: Any, input_split_sizes: Any = None, *rest: Any, **keywords: Any) -> Any:
        if input_split_sizes is None or group.size() == 1 or dist.get_backend(group) != "gloo":
            return scatter(input_, group, input_split_sizes, *rest, **keywords)
        summed = input_.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return torch.split(summed, list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


# Modules that get their own `torch`.
CUDA_MODULES = [hook.module for hook in load_hooks() if hook.platform == "cpu" and hook.names == ("torch",)]


@cache
def apply_patches() -> None:
    """Make Megatron-Core run on this process's CPU."""
    overlay = build_cpu_torch()
    # No run on a CPU calls Megatron-Core's fused functions, but their definition imports torch's compiler: seconds.
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]  # as Megatron-Core calls it
    # Megatron-Core has looked torch.compile up before, if one of its modules is imported.
    _import_module("megatron.core.jit").disable_jit_fuser()
    try:
        modules = [_import_module(name) for name in CUDA_MODULES]
    finally:
        torch.compile = compile_function
    if (compiler := sys.modules.get("torch._dynamo")) is not None:  # of functions that were imported before
        compiler.config.disable = True
    check_hooks("cpu")
    for module in modules:
        module.torch = overlay
    _patch_tensor_methods()
    _use_torch_optimizers()
    patch_state_of_adamw()
    _patch_experts()
    _allow_uneven_parts()
    # Dropout and initialisation draw from the RNG tracker, which keeps states of the CPU's generator then.
    random = _import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)
    # A checkpoint's tensors are allocated on the CPU.
    sharded_tensor = _import_module("megatron.core.dist_checkpointing.mapping").ShardedTensor
    init_data = sharded_tensor.init_data
    sharded_tensor.init_data = lambda self, device, *args, **kwargs: init_data(self, "cpu", *args, **kwargs)


def _patch_tensor_methods() -> None:
    # Unlike a name in `torch`, a method cannot be replaced for some modules only.
    original_type = torch.Tensor.type

    def convert_as_on_cuda(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, *args, **kwargs)

    torch.Tensor.type = convert_as_on_cuda  # type: ignore[method-assign,assignment]  # the point of this function
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # the point of this function


def _use_torch_optimizers() -> None:
    # Megatron-Core takes Transformer Engine's Adam and kernels where that is installed, and they need a GPU.
    optimizers, local = _import_module("megatron.core.optimizer"), _import_module("megatron.core.utils")
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    clip_grads = _import_module("megatron.core.optimizer.clip_grads")
    for module in (clip_grads, _import_module("megatron.core.optimizer.optimizer")):
        module.multi_tensor_applier = local.local_multi_tensor_applier
        module.multi_tensor_scale_impl = local.local_multi_tensor_scale
    clip_grads.l2_norm_impl = local.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None


def _patch_experts() -> None:
    # Transformer Engine's product, which the router takes where it is installed, needs a GPU.
    _import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # alltoall needs its split sizes as numbers; the original converts them only when it copies them from a GPU.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _import_module("megatron.core.transformer.moe.token_dispatcher").maybe_move_tensor_to_cpu = to_host
