"""Rules that choose tokens among all in the loss of a step.

They see the whole step, before it trains, so that the choice does not depend on microbatches or the layout.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.config.formulas import Selection
from megatron_grpo.config.loss_schema import LossConfig


def list_figures(rule: Selection) -> tuple[str, ...]:
    """List the fields that a rule reads beside advantages."""
    return ("prev_entropy",) if rule == "highest_entropy" else ("prev_logprobs",)


def mark_selected(config: LossConfig, figures: Tensor, advantages: Tensor, is_candidate: Tensor) -> Tensor:
    """Mark the tokens that the rule of the loss chooses.

    The result is [tokens], float32, 1 or 0. `is_candidate`, [tokens], bool: the tokens in the loss of the step. The
    other tensors are those of `select_tokens`, at all tokens. A token whose figure is not finite, which a filter of
    sampling removes, is not chosen.
    """
    assert config.selection is not None
    is_candidate = is_candidate & figures.isfinite()
    selected = torch.zeros_like(figures)
    chosen = select_tokens(config.selection, config, figures[is_candidate], advantages[is_candidate])
    selected[is_candidate] = chosen.to(selected.dtype)
    return selected


def select_tokens(rule: Selection, config: LossConfig, figures: Tensor, advantages: Tensor) -> Tensor:
    """Choose tokens by the rule: [tokens], bool.

    Both tensors are [tokens], float32, of the tokens in the loss of the step. `figures` are their log-probabilities
    before the step, or for highest_entropy the entropies there.
    """
    selected = torch.zeros(len(figures), dtype=torch.bool)
    if not len(figures):
        return selected
    if rule == "highest_entropy":
        # Of equal entropies at the threshold all are chosen.
        threshold = np.quantile(figures.double().numpy(), 1 - config.top_entropy_quantile)
        return figures.double() >= threshold
    covariances = covariance(figures, advantages)
    if rule == "highest_covariance":
        count = max(1, int(config.kl_cov_share * len(figures)))
        selected[covariances.argsort(descending=True, stable=True)[:count]] = True
        return selected
    candidates = ((covariances > config.clip_cov_min) & (covariances < config.clip_cov_max)).nonzero().flatten()
    # At random, as the paper does; seeded by the step itself, so that a replay chooses the same.
    draw = torch.Generator().manual_seed(len(figures))
    count = max(1, int(config.clip_cov_share * len(figures)))
    selected[candidates[torch.randperm(len(candidates), generator=draw)[:count]]] = True
    return selected


def covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """(log pi - mean) (A - mean) of each token (Cui et al. 2025)."""
    values, centred = logprobs.double(), advantages.double()
    return (values - values.mean()) * (centred - centred.mean())
