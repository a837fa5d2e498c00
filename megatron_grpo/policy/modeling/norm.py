"""RMS norms of the torch layer spec; Megatron-Core's own wrapper refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.platform.device import current_platform


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    With zero-centered norms (`TransformerConfig.layernorm_zero_centered_gamma`) the factor is 1 + weight, and
    everything is computed in float32: a small weight would vanish in a 1 of bfloat16.

    The weight is marked `sequence_parallel` like Transformer Engine's: each tensor-parallel rank then sees only part of
    the tokens, and Megatron-Core adds the gradients up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = current_platform().device
        weight: Any = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size], any float type, to the norm of every row, in shape and dtype of `hidden`."""
        if not self.zero_centered:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(hidden)


class NormedRowParallelLinear(RowParallelLinear):
    """The projection back into the residual stream, and the norm of what it gives.

    The norm sees whole rows: tensor-parallel ranks have added up their parts, and with sequence parallelism each has
    all features of some tokens.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[length, sequences, features of this rank], any float type, to [length, sequences, output_size], no bias."""
        projected, bias = super().forward(hidden)
        assert bias is None, "a bias would have to be added before the norm"
        return self.post_norm(projected), None
