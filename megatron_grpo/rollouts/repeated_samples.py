"""Finds samples of a prompt that are copies of each other, where independent draws would hardly agree.

The samples of a group are independent draws. If k of them are drawn, the probability that some m have the same tokens,
and that these tokens have a probability of at most p, is at most the sum of binomial(k, m) q^m over all sequences of
probability q <= p. That is at most binomial(k, m) p^(m - 1), because the q add up to at most 1. And p is known: each
token is recorded with the probability under which it was drawn. So a short answer that the policy is sure of may be
sampled many times (p is near 1), and twenty equal tokens of a policy that is not sure are copies: one seed for several
samples, or a response that is sent twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from megatron_grpo.batch.trajectory import Trajectory

REPEATED = "repeated_sample"
"""Metric of a response that is a copy: the common logarithm of the bound."""

# Bound below which samples are copies. A run of a million groups would report chance with a probability of 0.1% for
# each number of equal samples.
LIMIT = math.log(1e-9)

# vLLM draws the likeliest token below this temperature, whatever its recorded probability is.
GREEDY_BELOW = 1e-5


def flag_repeated_samples(group: Sequence[Trajectory], temperature: float) -> None:
    """Flag the samples of a prompt that are copies (`REPEATED`)."""
    if temperature < GREEDY_BELOW:
        return
    equal: defaultdict[bytes, list[Trajectory]] = defaultdict(list)
    for trajectory in group:
        if trajectory.failure is None and trajectory.finite_logprobs:
            equal[trajectory.token_ids.tobytes()].append(trajectory)
    for trajectories in equal.values():
        bound = _bound_probability(trajectories, sum(map(len, equal.values())))
        if bound < LIMIT:
            for trajectory in trajectories:
                # A new mapping: environments may give several responses the same one.
                trajectory.reward_metrics = trajectory.reward_metrics | {REPEATED: bound / math.log(10.0)}


def _bound_probability(equal: Sequence[Trajectory], samples: int) -> float:
    """Bound the probability that independent draws agree: its logarithm."""
    if len(equal) == 1:
        return 0.0
    # Copies may be recorded with probabilities that differ by rounding, so the largest counts.
    largest = max(float(trajectory.logprobs.sum(dtype="float64")) for trajectory in equal)
    return math.log(math.comb(samples, len(equal))) + (len(equal) - 1) * largest
