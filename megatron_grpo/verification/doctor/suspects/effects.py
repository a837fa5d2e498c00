"""First-order effects of changes on log-probabilities, by which thousands of suspects are ranked in one pass.

To try a suspect exactly takes a forward pass, and a fault may be in any one head, layer, row or adapter. For a small
change d of the weights the log-probability of token t changes by g_t . d, with its gradient g_t. One backward pass for
each of some tokens therefore gives the effect of every such change on these tokens: a factor of a part is the direction
of its weights, a part of another version the difference of the two, a swap of two rows the difference of the rows.
Compared with the recorded differences they say which few suspects are worth an exact evaluation. Large changes are not
linear, so the ranks decide what is tried, never what is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.suspects.parts import Part
from megatron_grpo.verification.doctor.suspects.side import Side

LINEAR_TOKENS = 128
"""Tokens that are differentiated: more than suspects are wrong together, and few for a large model."""
CLIPPED_GAP = 5.0
"""Largest recorded difference, in nats, that ranks suspects; larger ones are far from linear."""

Gradients = Mapping[str, Tensor]
"""By the name of a tensor: the gradient of one token's log-probability, in the tensor's shape."""
Probe = Callable[[Gradients], Tensor]
"""From the gradients of a token to the effects of some changes on it, [changes], float32."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of changes on tokens, beside the recorded differences of these tokens."""

    gap: Tensor
    """[tokens], float32: the record less the oracle."""
    columns: Tensor
    """[tokens, changes], float32: the oracle's own difference if the change is made, to first order."""

    def rank_multiples(self, limit: int) -> list[int]:
        """Rank changes by the share of the differences that their best multiple explains."""
        # The share is the squared cosine of the angle between the effect and the differences.
        products, squares = self.gap @ self.columns, self.columns.square().sum(0)
        shares = torch.where(squares > 0, products.square() / squares.clamp(min=1e-20), 0.0)
        return _rank(shares, limit)

    def rank_changes(self, limit: int) -> list[int]:
        """Rank changes by the differences that each leaves as it is."""
        return _rank(-(self.gap[:, None] - self.columns).abs().mean(0), limit)


def _rank(scores: Tensor, limit: int) -> list[int]:
    order: list[int] = scores.argsort(descending=True)[:limit].tolist()
    return order


def compute_effects(side: Side, probes: Sequence[Probe], names: Collection[str] | None = None) -> list[Effects]:
    """Compute the effects that each probe reads from the gradients of some tokens.

    Args:
        side: the record.
        probes: changes of the weights.
        names: weights that are changed; None: any.
    """
    part = _select_tokens(side)
    rows: list[list[Tensor]] = [[] for _ in probes]
    for gradients in part.oracle.compute_gradients(part.tokens, part.law, names):
        for row, probe in zip(rows, probes, strict=True):
            row.append(probe(gradients))
    gap = clip_gap(part.recorded - part.predict())
    return [Effects(gap, torch.stack(row).nan_to_num(0.0)) for row in rows]


def clip_gap(gap: Tensor) -> Tensor:
    """Clip recorded differences to what is nearly linear."""
    return gap.nan_to_num(0.0, CLIPPED_GAP, -CLIPPED_GAP).clamp(-CLIPPED_GAP, CLIPPED_GAP)


def _select_tokens(side: Side) -> Side:
    lengths, chosen = side.lengths, list[int]()
    for number in range(len(lengths)):
        if sum(lengths[index] for index in chosen) >= LINEAR_TOKENS:
            break
        chosen.append(number)
    return side.select_rollouts(chosen)


def make_part_probe(parts: Sequence[Part], changes: Mapping[str, Tensor]) -> Probe:
    """Make a probe of changes that are restricted to one part each.

    Args:
        parts: parts of the model.
        changes: the change of each whole tensor, by name: its weights for a factor, a difference for another version.
    """

    def measure_effects(gradients: Gradients) -> Tensor:
        products = {name: value * changes[name] for name, value in gradients.items() if name in changes}
        sums = {name: float(value.sum()) for name, value in products.items()}
        return torch.tensor(
            [
                sum(
                    float(products[name][region].sum()) if region else sums[name]
                    for name, region in part.regions.items()
                    if name in products
                )
                for part in parts
            ]
        )

    return measure_effects
