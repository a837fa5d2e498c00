"""The decay of a learning rate by a function of the user."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.optimizer_schema import OptimizerConfig
from megatron_grpo.losses.named_formula import NamedFormula, make_formula

INPUTS = {
    "progress": "share of the decay that is over, from 0 to 1",
    "step": "optimizer steps so far, this one and the warm-up included",
    "steps": "optimizer steps of the schedule, warm-up included",
}
"""Numbers that a decay may take, by the name of the parameter."""
_MOST_TRIALS = 1000


def make_decay(section: str, optimizer: OptimizerConfig, folders: tuple[str, ...]) -> NamedFormula | None:
    """Make the user's decay; None: the decay is built in.

    `section`: the model's, such as "policy". RunError: it cannot be imported, or has other options.
    """
    if optimizer.has_built_in_decay:
        return None
    setting, path = f"{section}.optimizer.decay_style={optimizer.decay_style}", optimizer.decay_style
    return make_formula(setting, path, inputs=INPUTS, keys={}, options=optimizer.decay_options, folders=folders)


def compute_height(decay: NamedFormula, step: int, steps: int, warmup: int) -> float:
    """Compute the share of the way from min_lr to lr; RunError: it is none."""
    inputs: Mapping[str, Any] = {
        "progress": min(1.0, (step - warmup) / (steps - warmup)),
        "step": step,
        "steps": steps,
    }
    result = decay(**inputs)
    try:
        height = float(result)
    except (TypeError, ValueError, RuntimeError):
        height = math.nan
    if not 0 <= height <= 1:
        at = ", ".join(f"{name}={value:g}" for name, value in inputs.items())
        text = f"at {at}, and not a number from 0 (the learning rate is min_lr) to 1 (it is lr)"
        raise RunError(f"{decay.setting} returned {str(result)[:80]} {text}")
    return height


def find_decay_problem(decay: NamedFormula, steps: int, warmup: int) -> str | None:
    """Find what is wrong with a decay; None: nothing at its steps."""
    steps = max(steps, warmup + 1)
    stride = -(-(steps - warmup) // _MOST_TRIALS)
    try:
        for step in (*range(warmup, steps, stride), steps):
            if compute_height(decay, step, steps, warmup) != compute_height(decay, step, steps, warmup):
                return f"returned two values for step={step}; each rank, and a resume, has to get the same one"
    except RunError as error:
        return str(error).removeprefix(f"{decay.setting} ")
    return None
