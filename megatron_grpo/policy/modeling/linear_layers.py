"""Giving every linear layer of a spec a class in front of its own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def with_front(block: TransformerBlockSubmodules, front: type, **arguments: Any) -> TransformerBlockSubmodules:
    """The spec of a stage's layers with a class in front of that of every linear layer; changes it.

    Args:
        block: whose layers are made of torch modules.
        front: the class; it overrides what it wants to and leaves the rest to the layer's, which comes after it.
        arguments: what the class's constructor takes by name, besides the layer's own arguments.
    """
    for layer in block.layer_specs:
        _put_within(layer.submodules, front, arguments)
    return block


@cache
def fronted(front: type, layer: type) -> type:
    """A subclass of a linear layer of Megatron-Core's, or of one of its subclasses, with a class in front of it."""
    return type(f"{front.__name__}{layer.__name__}", (front, layer), {})


def _put_within(parts: Any, front: type, arguments: dict[str, Any]) -> None:
    """Change the linear layers among some submodules of a spec, and those within them."""
    if not is_dataclass(parts):
        return
    for field in fields(parts):
        part = getattr(parts, field.name)
        kind, params = (part.module, part.params) if isinstance(part, ModuleSpec) else (part, {})
        if _is_linear(kind):
            if not issubclass(kind, front):  # the layers may share one spec
                setattr(parts, field.name, ModuleSpec(module=fronted(front, kind), params={**params, **arguments}))
        elif isinstance(part, ModuleSpec):
            _put_within(part.submodules, front, arguments)


def _is_linear(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, (ColumnParallelLinear, RowParallelLinear))
