"""Estimates from samples of each prompt: pass@k, majority votes, means with intervals, and paired comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

RESAMPLES = 10_000
"""Of a bootstrap. Its percentiles then vary by about a hundredth of the interval."""
LEVEL = 0.95
"""Of every interval."""
_SEED = 0
"""Of the bootstrap: the same samples have the same interval."""
_DIGITS = 12
"""Decimals of a difference of accuracies that count; in binary 1 - 2/3 and 2/3 - 1/3 differ in the 16th."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and how far it is known."""

    mean: float
    low: float
    high: float
    """Ends of the interval that holds the mean over all such prompts with a probability of LEVEL."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of a prompt's samples, drawn without replacement, hold a right one.

    The unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k).

    Args:
        samples: responses drawn for the prompt, n; at least k.
        right: of these, c.
        k: how many are drawn.

    Raises:
        ValueError: there are fewer samples than are drawn.
    """
    if samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, and there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def consensus_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """How often the answer that most of k samples give is right.

    The mean over as many groups of k neighbouring samples as there are; what is left over is not looked at. Of answers
    that equally many give, the one that was given first counts.

    Args:
        answers: of each sample; equal texts are one answer, None is none.
        right: whether each sample is right.
        k: samples that vote.

    Raises:
        ValueError: there are fewer samples than vote.
    """
    if len(answers) < k:
        raise ValueError(f"cons@{k} needs at least {k} samples of a prompt, and there are {len(answers)}")
    groups = range(0, len(answers) - k + 1, k)
    return fmean(_majority_is_right(answers[begin : begin + k], right[begin : begin + k]) for begin in groups)


def bootstrap_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with its percentile-bootstrap interval (Efron 1979), from RESAMPLES resamples.

    Args:
        values: one of each prompt, such as the mean over its samples: the samples of a prompt are not independent of
            each other, so that prompts are what is drawn again.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no prompt has a value, so there is no mean")
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(_SEED)
    # In pieces: all indices at once would take 8 bytes times RESAMPLES times prompts.
    means = np.concatenate(
        [array[generator.integers(len(array), size=(100, len(array)))].mean(axis=1) for _ in range(RESAMPLES // 100)]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(array.mean()), float(low), float(high))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value that two models are right equally often, by the exact test of McNemar (1947).

    Args:
        only_first: prompts that the first alone got right.
        only_second: prompts that the second alone got right.
    """
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, count) for count in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**discordant))


def wilcoxon(differences: Sequence[float]) -> float:
    """Two-sided p-value that differences are symmetric around 0: the signed-rank test of Wilcoxon (1945).

    Differences of 0 are left out. The normal approximation, whose variance is corrected for ties. Differences that are
    the same to 12 decimals are tied: a sample of three is worth as much whatever the other two were.

    Args:
        differences: of each prompt, between the accuracies of two models.
    """
    values = np.round(np.asarray(differences, dtype=np.float64), _DIGITS)
    values = values[values != 0.0]
    count = len(values)
    if not count:
        return 1.0
    _, place, ties = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # of equal ones, the mean of theirs
    positive = float(ranks[values > 0].sum())
    variance = count * (count + 1) * (2 * count + 1) / 24 - float((ties**3 - ties).sum()) / 48
    return math.erfc(abs(positive - count * (count + 1) / 4) / math.sqrt(2 * variance))


def _majority_is_right(answers: Sequence[str | None], right: Sequence[bool]) -> bool:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner, _ = votes.most_common(1)[0]  # of equal counts the one that came first
    return right[answers.index(winner)]
