"""The keys of optimizers and their learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Predicate
from pydantic import Field

from megatron_grpo.config.section import (
    FormulaOptions,
    ImportPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
)

# Shapes of the decay; the last three are further names in transformers.
DECAY_STYLES = (
    *("constant", "linear", "cosine", "inverse_sqrt", "polynomial", "cosine_with_restarts"),
    *("warmup_stable_decay", "constant_with_warmup", "cosine_with_min_lr"),
)
DecayStyle = Annotated[
    ImportPath,
    Predicate(lambda path: path in DECAY_STYLES or "." in path),
    f"one of {', '.join(DECAY_STYLES)}, or module.function",
]


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; muon: the layers' matrices by Muon, embeddings, head, norms and biases by AdamW (docs/algorithms.md)."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""

    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0 to lr."""

    warmup_ratio: Share | None = None
    """Share of the schedule's optimizer steps that is warm-up, rounded up; null: warmup_steps."""

    decay_steps: Positive | None = None
    """Optimizer steps until min_lr, warm-up included; null: all optimizer steps of max_num_steps steps."""

    decay_style: DecayStyle = "constant"
    """Shape of the decay after the warm-up. warmup_stable_decay stays at lr until the last final_decay_steps, which are
    linear. constant_with_warmup and cosine_with_min_lr are transformers' names of constant and cosine. Or a function of
    your own (docs/extending.md)."""

    decay_options: FormulaOptions = field(default_factory=dict)
    """Parameters of your own decay_style by name, such as decay_options.floor=0.1; those of the built-in ones are
    keys."""

    decay_power: PositiveFloat = 1.0
    """With polynomial, exponent of the remaining share of the decay in the learning rate; 1 is linear."""

    decay_cycles: Positive = 1
    """With cosine_with_restarts, the number of cosines, each of which begins at lr."""

    final_decay_steps: Positive | None = None
    """With warmup_stable_decay, the optimizer steps of the decay at the end; null: a tenth of the schedule."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, applied to matrices only (not to biases and norms)."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""

    adam_eps: PositiveFloat = 1e-8
    """Added to the denominator of the update."""

    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """With muon, decay of its one moment."""

    muon_nesterov: bool = True
    """With muon, orthogonalize a mean of gradient and moment (Nesterov); false: the moment."""

    muon_ns_steps: Positive = 5
    """With muon, the Newton-Schulz iterations that orthogonalize a matrix."""

    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """With muon, scale of a matrix [out, in]. spectral: sqrt(max(out, in)) (Moonlight, arXiv 2502.16982);
    shape_scaling: sqrt(max(1, out / in)) (Jordan 2024); unit_rms_norm: sqrt(out / in) (Scion, arXiv 2502.07529)."""

    muon_extra_scale_factor: PositiveFloat = 0.2
    """With muon, a further factor of its updates. 0.2 with spectral gives them AdamW's size, so AdamW's lr fits."""

    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron-Core's distributed optimizer, as ZeRO-1; with muon whole
    matrices)."""

    cpu_offload: Share = 0.0
    """Share of the optimizer state that is in host memory and is updated there: 0 none, 1 all. Needs GPUs."""

    precision_aware: bool = False
    """Keep moments and main weights in Transformer Engine's Adam, in the types of policy.megatron_optimizer
    (exp_avg_dtype and others; float32 by default). Needs GPUs with Transformer Engine, and distributed=true."""

    @property
    def has_built_in_decay(self) -> bool:
        """True unless the decay is a function of the user."""
        return self.decay_style in DECAY_STYLES

    @property
    def depends_on_steps(self) -> bool:
        """True if the learning rate of a step depends on the number of steps."""
        has_own_end = self.decay_style in ("constant", "constant_with_warmup", "inverse_sqrt")
        return self.decay_steps is None and (self.warmup_ratio is not None or not has_own_end)

    def count_warmup_steps(self, schedule_steps: int) -> int:
        """Count the warm-up steps of a schedule with `schedule_steps` optimizer steps."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * schedule_steps)
