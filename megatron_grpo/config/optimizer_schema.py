"""The keys of the optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import NonNegative, Positive, Section


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""

    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""

    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0 to lr."""

    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """The warm-up as a share of the schedule's optimizer steps, rounded up, in place of warmup_steps; null: those."""

    decay_steps: Positive | None = None
    """Optimizer steps until min_lr is reached, warm-up included; null: those of max_num_steps steps."""

    decay_style: Literal[
        "constant", "linear", "cosine", "inverse_sqrt", "constant_with_warmup", "cosine_with_min_lr"
    ] = "constant"
    """Shape of the decay after the warm-up; constant_with_warmup and cosine_with_min_lr are the names that transformers
    has for constant and cosine."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, applied to matrices only (not to biases and norms)."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update."""

    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron-Core's distributed optimizer, as ZeRO-1)."""

    cpu_offload: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the optimizer state, and of its update, that is in host memory: 0 none, 1 all. Needs GPUs."""

    precision_aware: bool = False
    """Let Transformer Engine's Adam hold moments and main weights, in the types that policy.megatron_optimizer gives
    (exp_avg_dtype, exp_avg_sq_dtype, main_params_dtype, main_grads_dtype; float32 by default). Needs GPUs with
    Transformer Engine, and distributed=true."""

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate stays at lr after the warm-up."""
        return self.decay_style in ("constant", "constant_with_warmup")

    def warmup(self, schedule_steps: int) -> int:
        """Optimizer steps of the warm-up, of a schedule of so many."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * schedule_steps)
