"""Which groups can teach anything: the question that dynamic sampling and its metrics ask."""

from __future__ import annotations

import torch
from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """Which groups can teach anything: those whose rewards are not all equal.

    Decided from the whole group. The standard deviation that a leave-one-out baseline pairs with a sample, that of the
    *other* samples, is 0 for a lone success, the sample that matters most.

    Args:
        rewards: [groups, samples], floating point, as the advantages are to see them; NaN where there is none, which is
            no difference.

    Returns:
        [groups], bool.
    """
    given = ~rewards.isnan()
    # Compared, not subtracted: a standard deviation of equal rewards may be a rounding error above 0.
    lowest = torch.where(given, rewards, torch.full_like(rewards, torch.inf)).amin(dim=1, keepdim=True)
    return (given & (rewards != lowest)).any(dim=1)
