"""The value model's loss: squared error to the returns, clipped around the values before the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_grpo.data.batch import TokenFields, given
from megatron_grpo.losses.loss import masked, token_mean

if TYPE_CHECKING:
    from megatron_grpo.config.loop_schema import MseValueLossConfig
    from megatron_grpo.losses.loss import GlobalCounts, Segments

_MOMENTS = ("return_squared", "value_error", "value_error_squared")
"""Metrics from which, with return_mean, the explained variance follows."""
_RELATIVE_VARIANCE = 1e-6
"""Returns whose variance is below this share of their mean square are all equal, up to rounding."""


class MseValueLossFn:
    """A loss over values (a `losses.loss.LossFunction` whose first argument is values)::

        loss = scale * token mean of 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    R are the returns, V_old the values before the step, c value_clip: what lies further from V_old than c and has
    become better loses its gradient (PPO's reference implementation; see Engstrom et al. 2020, section 3). Without
    value_clip it is the mean of 1/2 (V - R)^2. scale is the configuration's factor.
    """

    reads = ("sampled", "values", "returns")
    """Stored fields that the loss reads."""

    def __init__(self, config: MseValueLossConfig) -> None:
        self.config = config

    def __call__(
        self, curr_values: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The microbatch's share of the value model's loss and metrics; a call of `losses.loss.LossFunction`.

        Args:
            curr_values: [sequences, length], or flat [tokens], float32, with gradient: the value before each token.
            tokens: loss_mask, values (before the step) and returns, each in the shape of curr_values; ignored outside
                the mask.
            counts: denominators of the whole optimizer step.
            segments: unused by a mean over tokens.

        Returns:
            The microbatch's share of the loss, shape [], and shares of means over the step's tokens: `loss`,
            `value_clip_fraction` (tokens where clipping made the loss larger); `value_mean`, `return_mean`, and the
            moments that `add_explained_variance` turns into `explained_variance`, of the values before the step: later
            ones have seen these returns.
        """
        # Masked before any arithmetic: NaN in padding times a mask of 0 is NaN, in the loss and in its gradient.
        mask = given(tokens.loss_mask) > 0
        values, returns = masked(curr_values, mask), masked(given(tokens.returns), mask)
        old = masked(given(tokens.values), mask)
        error, old_error = values - returns, old - returns
        loss = clipped = error.square()
        if self.config.value_clip:
            reach = self.config.value_clip
            clipped = (torch.clamp(values, old - reach, old + reach) - returns).square()
            # The larger of both: clipping may take a gradient away, but never hide that a value has become worse.
            loss = torch.maximum(loss, clipped)
        total = 0.5 * token_mean(loss, mask, counts)
        metrics = {
            "loss": total,
            "value_clip_fraction": token_mean(clipped > error.square(), mask, counts),
            "value_mean": token_mean(old, mask, counts),
            "return_mean": token_mean(returns, mask, counts),
            "return_squared": token_mean(returns.square(), mask, counts),
            "value_error": token_mean(old_error, mask, counts),
            "value_error_squared": token_mean(old_error.square(), mask, counts),
        }
        return self.config.scale * total, metrics


def add_explained_variance(metrics: dict[str, float]) -> None:
    """Replace the moments in a step's metrics by explained_variance = 1 - Var(R - V) / Var(R).

    1: the values are the returns; 0: no better than a constant, also when the returns are all equal.
    """
    # From moments, because these are sums over ranks and microbatches, and a variance is not.
    squared, error, error_squared = (metrics.pop(name) for name in _MOMENTS)
    variance = squared - metrics["return_mean"] ** 2
    unexplained = error_squared - error**2
    known = variance > _RELATIVE_VARIANCE * squared
    metrics["explained_variance"] = 1.0 - unexplained / variance if known else 0.0
