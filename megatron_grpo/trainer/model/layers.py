"""RMS norms of the torch layers, and mixins for the linear layers of a spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Zhang and Sennrich 2019, eq. 4; in zero-centered norms (`layernorm_zero_centered_gamma`) the factor is 1 + weight.
    Megatron-Core's own wrapper of torch's norm refuses sequence parallelism, where ranks see only some tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: Any) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=config.platform.device)
        )
        weight.sequence_parallel = config.sequence_parallel  # Megatron-Core sums gradients over ranks by this mark
        self.weight, self.eps = weight, config.layernorm_epsilon if eps is None else eps
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise every row, in the dtype of `hidden`."""
        if not self.zero_centered:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # In float32: a small weight would vanish in a 1 of bfloat16.
        return F.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(hidden)


class HeadNorm(RMSNorm):
    """RMS norm within each head, never zero-centered.

    A gated delta net has it at its output. All heads share the weight, and a rank sees only its own heads, so gradients
    have to be summed over tensor-parallel ranks. Megatron-Core does so after backward if the sequence is split too;
    otherwise backward does it here.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise every row, in the dtype of `hidden`."""
        is_summed_later = getattr(self.weight, "sequence_parallel", False)
        weight = self.weight if is_summed_later else copy_to_tensor_model_parallel_region(self.weight)
        return F.rms_norm(hidden, weight.shape, weight, self.eps)


class QueryNorm(torch.nn.Module):
    """RMS norm of all heads of queries together (OLMo 3, MiniMax-M2).

    Tensor-parallel ranks have some of the heads each, and add up their squares. The weight is that of all heads; the
    gradient of a rank's part is added to those of the others after backward, by Megatron-Core.
    """

    def __init__(self, hidden_size: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.total, self.eps = self._count_heads(config) * hidden_size, config.layernorm_epsilon
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": config.platform.device}
        self.weight = torch.nn.Parameter(torch.empty(self.total, **options))

    def _count_heads(self, config: TransformerConfig) -> int:
        return config.num_attention_heads

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise vectors: [tokens, 1, heads of this rank, head_dim], in their dtype."""
        values = heads.float()
        squares = values.square().sum(dim=(-2, -1), keepdim=True)
        local, ranks = heads.shape[-2:].numel(), self.group.size()
        if ranks > 1:
            # Added up in both directions: every rank's heads depend on those of all ranks.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        # More ranks than keys hold copies of them, which then are in the sum as often.
        squares = squares * (self.total / (local * ranks))
        first = self.group.rank() * self.total // ranks // heads.shape[-1] * heads.shape[-1]
        weight = self.weight[first : first + local].view(heads.shape[-2:])
        return (weight.float() * (values * (squares / self.total + self.eps).rsqrt())).type_as(heads)


class KeyNorm(QueryNorm):
    """RMS norm of all heads of keys together."""

    def _count_heads(self, config: TransformerConfig) -> int:
        return config.num_query_groups


class ScaledQuery(torch.nn.Module):
    """Multiplies the part of queries that will be rotated.

    Scaled rotary embeddings (YaRN, LongRoPE) multiply rotated queries and keys by a factor, so here it is squared.
    """

    def __init__(self, hidden_size: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.scale: Tensor
        scale = torch.ones(hidden_size, dtype=config.params_dtype, device=config.platform.device)
        scale[: config.rotated_dim] = config.rope_factor**2
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Scale vectors: [tokens, 1, heads, head_dim]."""
        return heads * self.scale


class UnweightedNorm(torch.nn.Module):
    """RMS norm within each head, without a weight."""

    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self._size, self._eps = hidden_size, eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise every row, in the dtype of `hidden`."""
        return F.rms_norm(hidden, (self._size,), eps=self._eps)


class ExpertRowParallelLinear(RowParallelLinear):
    """An expert's second matrix, if experts have biases.

    Megatron-Core adds the bias to this layer's result in place, which autograd forbids for a view that a function of
    Megatron-Core's returned. So the result is a copy.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply; the bias is not added: [tokens, columns] to [tokens, rows]."""
        output, bias = super().forward(input_)
        return output.clone(), bias


class NormedRowParallelLinear(RowParallelLinear):
    """The projection back into the residual stream, followed by a norm."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.post_norm = RMSNorm(config, output_size)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        projected, bias = super().forward(input_)
        assert bias is None, "a bias would have to be added before the norm"
        # The norm sees whole rows: tensor-parallel ranks have summed their partial products, and with sequence
        # parallelism each has all features of some tokens.
        return self.post_norm(projected), None


def apply_mixin(
    block: TransformerBlockSubmodules,
    mixin: type,
    *,
    names: Collection[str] | None = None,
    grouped: type | None = None,
    **arguments: Any,
) -> None:
    """Make `mixin` the first base class of a stage's linear layers; changes their spec.

    With `names`, only layers of these names are changed. `grouped` is the mixin of layers with the matrices of several
    experts. The mixin's constructor takes `arguments` in addition to the layer's.
    """
    for layer in block.layer_specs:
        _mix_in(layer.submodules, mixin, names, grouped, arguments)


def _mix_in(
    parts: Any, mixin: type, names: Collection[str] | None, grouped: type | None, arguments: dict[str, Any]
) -> None:
    if isinstance(parts, GroupedMLPSubmodules):
        assert grouped is not None, "these layers have the matrices of several experts"
        mixin = grouped
    for field in fields(parts) if is_dataclass(parts) else ():
        part = getattr(parts, field.name)
        module, params = (part.func, part.keywords) if isinstance(part, partial) else (part, {})
        is_grouped = isinstance(parts, GroupedMLPSubmodules) and field.name.startswith("linear_")
        if isinstance(module, type) and (is_grouped or issubclass(module, (ColumnParallelLinear, RowParallelLinear))):
            # Layers may share one spec, which the first of them has changed.
            if (names is None or field.name in names) and not issubclass(module, mixin):
                mixed = type(f"{mixin.__name__}{module.__name__}", (mixin, module), {})
                setattr(parts, field.name, partial(mixed, **params, **arguments))
        elif isinstance(part, (ModuleSpec, partial)):
            _mix_in(get_submodules(part), mixin, names, grouped, arguments)
