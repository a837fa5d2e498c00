"""Finds samples of a prompt that are copies of each other, where independent draws would hardly agree.

The samples of a group are independent draws. If k of them are drawn, the probability that some m have the same tokens,
and that these tokens have a probability of at most p, is at most the sum of binomial(k, m) q^m over all sequences of
probability q <= p. That is at most binomial(k, m) p^(m - 1), because the q add up to at most 1; and k - 1 times this
holds for all m together. And p is known: each token is recorded with the probability under which it was drawn. So a
short answer that the policy is sure of may be sampled many times (p is near 1), and twenty equal tokens of a policy
that is not sure are copies: one seed for several samples, or a response that is sent twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from megatron_grpo.batch.trajectory import Outcome, Trajectory

REPEATED = "repeated_sample"
"""Metric of a response that equals another sample of its prompt: the common logarithm of the bound."""

# Logarithm of the bound below which samples are copies: a run of a million groups takes chance for copies with a
# probability of 0.1%.
LIMIT = math.log(1e-9)

# vLLM draws the likeliest token below this temperature, whatever its recorded probability is.
GREEDY_BELOW = 1e-5


def record_repeated_samples(group: Sequence[Trajectory], temperature: float) -> None:
    """Record the bound of equal samples of a prompt (`REPEATED`)."""
    if temperature < GREEDY_BELOW:
        return
    equal: defaultdict[bytes, list[Trajectory]] = defaultdict(list)
    for trajectory in group:
        if trajectory.failure is None and trajectory.finite_logprobs:
            equal[trajectory.token_ids.tobytes()].append(trajectory)
    for trajectories in equal.values():
        sums = [float(trajectory.logprobs.sum(dtype="float64")) for trajectory in trajectories]
        bound = bound_probability(sums, sum(map(len, equal.values())))
        if bound < 0:
            for trajectory in trajectories:
                # A new mapping: environments may give several responses the same one.
                trajectory.reward_metrics = trajectory.reward_metrics | {REPEATED: bound / math.log(10.0)}


def bound_probability(equal: Sequence[float], samples: int) -> float:
    """Bound the probability that independent draws agree: its logarithm.

    Args:
        equal: logarithm of the probability of each sample of those that have the same tokens.
        samples: all samples of the prompt.
    """
    if len(equal) == 1:
        return 0.0
    # Copies may be recorded with probabilities that differ by rounding, so the largest counts.
    return math.log((samples - 1) * math.comb(samples, len(equal))) + (len(equal) - 1) * max(equal)


def bound_groups(bounds: Sequence[float]) -> float:
    """Bound the probability that chance made all groups together so alike: its logarithm.

    The negative logarithms of the groups' bounds are at most exponentially distributed by chance, so for the sum s of g
    groups the probability is at most exp(g - s) (s / g)^g (Chernoff).
    """
    total, groups = -sum(bounds), len(bounds)
    return groups - total + groups * math.log(total / groups) if total > groups else 0.0


def find_copies(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Find the samples whose equality chance does not explain.

    In one group, or in all groups together: answers may be so short that no group alone shows that seeds are shared.
    """
    bounds: dict[tuple[int, int], float] = {}
    for outcome in outcomes:
        key = outcome.group, outcome.prompt_idx
        bounds[key] = min(bounds.get(key, 0.0), outcome.reward_metrics.get(REPEATED, 0.0) * math.log(10.0))
    is_common = bound_groups(list(bounds.values())) < LIMIT
    limit = 0.0 if is_common else LIMIT / math.log(10.0)
    return [outcome for outcome in outcomes if outcome.reward_metrics.get(REPEATED, 0.0) < limit]
