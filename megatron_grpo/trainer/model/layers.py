"""RMS norms of the torch layers, and a way to put a class in front of every linear layer of a spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    With zero-centered norms (`TransformerConfig.layernorm_zero_centered_gamma`) the factor is 1 + weight, and
    everything is computed in float32: a small weight would vanish in a 1 of bfloat16.

    Megatron-Core's own wrapper of torch's norm refuses sequence parallelism, in which each tensor-parallel rank sees
    only some tokens. Megatron-Core sums the gradients of weights that are marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=config.platform.device)
        )
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size], any float type, to every row normalised, in shape and dtype of `hidden`."""
        if not self.zero_centered:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(hidden)


class NormedRowParallelLinear(RowParallelLinear):
    """The projection back into the residual stream, followed by a norm.

    The norm sees whole rows: tensor-parallel ranks have summed their partial products, and with sequence parallelism
    each has all features of some tokens.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[length, sequences, features of this rank], any float type, to [length, sequences, output_size], no bias."""
        projected, bias = super().forward(input_)
        assert bias is None, "a bias would have to be added before the norm"
        return self.post_norm(projected), None


def apply_mixin(
    block: TransformerBlockSubmodules, front: type, names: Collection[str] | None = None, **arguments: Any
) -> None:
    """Make `front` the first base class of linear layers in a stage's spec of torch modules, in place.

    The front overrides methods of the layer's own class, the next base; `arguments` are keyword arguments of the
    front's constructor, in addition to the layer's. `names`: layers with these names outside of experts; None: all.
    """
    for layer in block.layer_specs:
        _put_in_front(layer.submodules, front, names, arguments)


@cache
def _fronted(front: type, layer: type) -> type:
    """A subclass of one of Megatron-Core's linear layers, in which the methods of `front` override the layer's."""
    return type(f"{front.__name__}{layer.__name__}", (front, layer), {})


def _put_in_front(parts: Any, front: type, names: Collection[str] | None, arguments: dict[str, Any]) -> None:
    """Change the linear layers among a spec's submodules, recursively."""
    for field in fields(parts) if is_dataclass(parts) else ():
        part = getattr(parts, field.name)
        kind, params = (part.module, part.params) if isinstance(part, ModuleSpec) else (part, {})
        is_linear = isinstance(kind, type) and issubclass(kind, (ColumnParallelLinear, RowParallelLinear))
        if is_linear:
            # The layers may share one spec.
            if (names is None or field.name in names) and not issubclass(kind, front):
                setattr(parts, field.name, ModuleSpec(module=_fronted(front, kind), params={**params, **arguments}))
        elif isinstance(part, ModuleSpec) and (names is None or kind is not MoELayer):
            _put_in_front(part.submodules, front, names, arguments)
