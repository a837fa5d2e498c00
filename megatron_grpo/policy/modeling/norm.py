"""RMS norm of the torch layer spec; Megatron-Core's own wrapper refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.platform.device import current_platform


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

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

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size], any float type, to the norm of every row, in shape and dtype of `hidden`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
