"""Which sequence each token of a microbatch belongs to, for layers that look at tokens without attending to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.models.routed import UNKNOWN

if TYPE_CHECKING:
    from megatron_grpo.policy.modeling.packed_sequences import Placement


@dataclass(frozen=True, slots=True)
class Membership:
    """Which sequences tokens belong to, in the order in which the layers between attention calls hold them."""

    sequence: Tensor
    """[tokens], int64: number of the token's sequence in the microbatch; padding belongs to one behind the last."""
    weight: Tensor
    """[tokens], float32: one over the tokens of the sequence; 0 on padding."""
    sequences: int


def membership(placement: Placement, *, part: int, parts: int, real: bool) -> Membership:
    """Which sequences a rank's tokens belong to.

    Args:
        placement: where the tokens stand.
        part: which part of them the rank holds under sequence parallelism.
        parts: in how many parts they are split.
        real: whether they are tokens of the batch; if not, all of them count as padding.
    """
    source = held_source(placement, part=part, parts=parts)
    count = len(placement.lengths)
    sequence = np.searchsorted(np.cumsum(placement.lengths), source, side="right")
    sequence = np.where(source < 0, count, sequence)
    weight = np.append(1.0 / np.maximum(placement.lengths, 1), 0.0)[sequence].astype(np.float32) * real
    return Membership(torch.from_numpy(sequence), torch.from_numpy(weight.astype(np.float32)), count)


def held_source(placement: Placement, *, part: int, parts: int) -> NDArray[np.int64]:
    """[tokens of a rank's part], int64: their indices in the flat sequences, -1 on padding; one of `parts` equal parts
    of what the context-parallel rank holds, as sequence parallelism cuts it."""
    each = placement.local_tokens // parts
    return placement.source[part * each : (part + 1) * each]


def held_routing(placement: Placement, routed: Tensor, *, part: int, parts: int, real: bool) -> Tensor:
    """The recorded experts of a rank's tokens, in the order in which the layers between attention calls hold them.

    Args:
        placement: where the tokens stand.
        routed: [tokens of the flat sequences, numbers of a token], int8 or int16, on the host.
        part: which part of the tokens the rank holds under sequence parallelism.
        parts: in how many parts they are split.
        real: whether they are tokens of the batch; if not, nothing is known of them.

    Returns:
        [tokens, numbers of a token], in the dtype of `routed`; -1 on padding.
    """
    source = torch.from_numpy(held_source(placement, part=part, parts=parts))
    held = routed[source.clamp(min=0)]
    held[source < 0 if real else slice(None)] = UNKNOWN
    return held
