"""`torch` as a module sees it that takes CUDA for granted, on a machine without: streams, devices, nothing compiled."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")
"""Functions of `torch` that Megatron-Core calls with device="cuda"."""


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Stream:
    """Stands in for torch.cuda.Stream and Event: on a CPU everything has happened when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True

    wait_stream = wait_event = record = wait = synchronize = _nothing


class _Overlay(ModuleType):
    """A module with some names replaced. What the original gains later (lazy imports) is found too."""

    def __init__(self, original: ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update({**vars(original), **replaced})
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def cpu_torch() -> ModuleType:
    """`torch` for modules that ask a GPU for what a CPU has as well."""
    stream = _Stream()

    cuda = _Overlay(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "Stream": _Stream,
            "Event": _Stream,
            "stream": contextlib.nullcontext,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
        },
    )
    return _Overlay(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES}})


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


@contextlib.contextmanager
def compiling_nothing() -> Iterator[None]:
    """torch.compile as the identity, in the body and then for Megatron-Core's fused functions.

    No run on a CPU calls one of them, but each that is defined makes torch import its compiler: seconds of a core.
    """
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]  # as Megatron-Core calls it
    try:
        yield
    finally:
        torch.compile = compile_function
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
