"""Estimates in results.json from scored responses: the figures of each set, and comparisons with another evaluation."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from megatron_grpo.algorithms.validation import compute_held_out_metrics
from megatron_grpo.batch.trajectory import Outcome, Trajectory
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.environments.math_answers import find_final_answer

SAMPLES_FILE = "samples.jsonl"
RESAMPLES = 10_000
"""Resamples of a bootstrap, enough for percentiles that vary by about a hundredth of the interval."""
LEVEL = 0.95
"""Confidence level of every interval."""
_SEED = 0
"""Seed of the bootstrap, fixed so that the same samples have the same interval."""
_DIGITS = 12
"""Decimals to which differences of accuracies are rounded: 1 - 2/3 and 2/3 - 1/3 differ only in the 16th."""


def estimate_pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of a prompt's samples, drawn without replacement, include a right one.

    The unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k).

    Args:
        samples: number of responses to the prompt, n; at least k.
        right: number of right responses, c.
        k: number of samples drawn.

    Raises:
        ValueError: there are fewer than k samples.
    """
    if samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, and there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def estimate_consensus_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """How often the majority answer of k samples is right.

    The mean over groups of k consecutive samples; a remainder of fewer than k is not used. Among answers with equal
    votes, the first one wins.

    Args:
        answers: answer of each sample; equal texts are one answer, None is not a vote.
        right: whether each sample is right.
        k: number of samples that vote.

    Raises:
        ValueError: there are fewer than k samples.
    """
    if len(answers) < k:
        raise ValueError(f"cons@{k} needs at least {k} samples of a prompt, and there are {len(answers)}")
    majorities = []
    for begin in range(0, len(answers) - k + 1, k):
        votes = Counter(answer for answer in answers[begin : begin + k] if answer is not None)
        # Of answers with equal votes most_common gives the one that came first.
        majorities.append(bool(votes) and right[answers.index(votes.most_common(1)[0][0], begin)])
    return fmean(majorities)


def compute_bootstrap_interval(values: Sequence[float]) -> dict[str, float]:
    """The mean of independent values with its percentile-bootstrap interval (Efron 1979), from RESAMPLES resamples.

    Args:
        values: one per prompt, such as the mean over its samples. Prompts are resampled, not samples, since the samples
            of a prompt are not independent of each other.

    Returns:
        mean; low and high, the ends of the interval for the mean over all such prompts at the confidence level LEVEL.

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
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def compute_mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the hypothesis that two models are right equally often: McNemar's exact test (1947).

    Args:
        only_first: number of prompts that only the first model got right.
        only_second: number of prompts that only the second model got right.
    """
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, count) for count in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**discordant))


def compute_wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the hypothesis that differences are symmetric around 0: Wilcoxon's signed-rank test (1945).

    Uses the normal approximation, with the variance corrected for ties; differences of 0 are left out. Differences that
    are the same to 12 decimals are tied, because 1 - 2/3 and 2/3 - 1/3 differ only by rounding.

    Args:
        differences: for each prompt, the accuracy of one model minus that of the other.
    """
    values = np.round(np.asarray(differences, dtype=np.float64), _DIGITS)
    values = values[values != 0.0]
    count = len(values)
    if not count:
        return 1.0
    _, place, ties = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # equal values share the mean of their ranks
    positive = float(ranks[values > 0].sum())
    variance = count * (count + 1) * (2 * count + 1) / 24 - float((ties**3 - ties).sum()) / 48
    return math.erfc(abs(positive - count * (count + 1) / 4) / math.sqrt(2 * variance))


Row = dict[str, Any]
"""The content of a line of samples.jsonl."""


@dataclass(slots=True)
class AnsweredSet:
    """Prompts of a set with their outcomes and samples, all in the order of the prompts."""

    prompts: list[DatumSpec]
    outcomes: list[list[Outcome]]
    rows: list[list[Row]]


def make_sample_row(name: str, prompt: DatumSpec, one: Trajectory) -> Row:
    """One response as a line of samples.jsonl."""
    return {
        "set": name,
        "prompt_idx": prompt["idx"],
        "sample": one.sample,
        "task": prompt["task_name"],
        "prompt": prompt["prompt"],
        "reference": prompt["extra_env_info"].get(REFERENCE),
        "response": one.response,
        "correct": one.correct,
        "reward": one.reward,
        "reward_parts": one.reward_parts,
        "tokens": one.response_tokens,
        "stop_reason": one.stop_reason,
        "failure": one.failure,
    }


def find_vote(response: str) -> str | None:
    """The answer of a response in a vote: its last \\boxed{...}, else its last line; None if the response is empty."""
    boxed = find_final_answer(response)
    if boxed.startswith("\\boxed{"):
        return "".join(boxed.split())
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else None


def compute_set_results(answered: AnsweredSet, ks: Sequence[int]) -> dict[str, Any]:
    """The figures of one set.

    Args:
        answered: prompts of the set, and the responses to them.
        ks: the values of k for pass@k and cons@k.

    Returns:
        prompts; accuracy and reward, means over prompts of the mean over a prompt's responses, each with a bootstrap
        interval over prompts; for each k, pass@k and cons@k over the prompts with at least k judged responses, and the
        number of these prompts; metrics: the metrics that validation reports for the same responses.
    """
    results: dict[str, Any] = {"prompts": len(answered.prompts)}
    judged = [[row for row in rows if row["correct"] is not None] for rows in answered.rows]
    right = [[bool(row["correct"]) for row in rows] for rows in judged]
    if any(right):
        results["accuracy"] = compute_bootstrap_interval([fmean(one) for one in right if one])
    rewards = [[row["reward"] for row in rows if row["reward"] is not None] for rows in answered.rows]
    if any(rewards):
        results["reward"] = compute_bootstrap_interval([fmean(one) for one in rewards if one])
    for k in ks:
        enough = [number for number, one in enumerate(right) if len(one) >= k]
        if not enough:
            continue
        votes = [[find_vote(row["response"]) for row in judged[number]] for number in enough]
        passed = [estimate_pass_at_k(len(right[number]), sum(right[number]), k) for number in enough]
        agreed = [estimate_consensus_at_k(own, right[number], k) for own, number in zip(votes, enough, strict=True)]
        results[f"pass@{k}"] = {**compute_bootstrap_interval(passed), "prompts": len(enough)}
        results[f"cons@{k}"] = {**compute_bootstrap_interval(agreed), "prompts": len(enough)}
    return {**results, "metrics": compute_held_out_metrics(answered.prompts, answered.outcomes)}


def compare_evaluations(rows: Sequence[Row], before: Sequence[Row]) -> dict[str, Any]:
    """Comparison on the prompts that two evaluations share, by set.

    Prompts are the same when their set, row and text are. A prompt's accuracy is the mean over its responses.

    Args:
        rows: samples of this evaluation.
        before: samples of the earlier one.

    Returns:
        For each set: the number of shared prompts; both accuracies; their difference, with a paired bootstrap interval
        over prompts; the p-value of Wilcoxon's test; and with one response to each prompt, only_before and only_now
        (prompts that only one of them got right) with the p-value of McNemar's exact test.
    """
    now, then = _by_prompt(rows), _by_prompt(before)
    pairs: dict[str, list[tuple[list[bool], list[bool]]]] = {name: [] for name, _, _ in now}
    for key in now:
        if key in then:
            pairs[key[0]].append((then[key], now[key]))
    return {name: _compared(found) for name, found in pairs.items()}


def _by_prompt(rows: Sequence[Row]) -> dict[tuple[str, int, str], list[bool]]:
    """Whether each judged response is right, by set, row and text of the prompt."""
    found: dict[tuple[str, int, str], list[bool]] = {}
    for row in rows:
        if row["correct"] is not None:
            key = (row["set"], row["prompt_idx"], json.dumps(row["prompt"]))
            found.setdefault(key, []).append(bool(row["correct"]))
    return found


def _compared(responses: Sequence[tuple[list[bool], list[bool]]]) -> dict[str, Any]:
    """The comparison of one set; `responses`: by shared prompt, whether each response was right, before and now."""
    if not responses:
        return {"prompts": 0}
    pairs = [(fmean(before), fmean(now)) for before, now in responses]
    differences = [after - before for before, after in pairs]
    result: dict[str, Any] = {
        "prompts": len(pairs),
        "accuracy_before": fmean(before for before, _ in pairs),
        "accuracy_now": fmean(after for _, after in pairs),
        "difference": compute_bootstrap_interval(differences),
        "wilcoxon_p": compute_wilcoxon_p(differences),
    }
    if all(len(before) == len(now) == 1 for before, now in responses):
        only_before, only_now = differences.count(-1.0), differences.count(1.0)
        result |= {
            "only_before": only_before,
            "only_now": only_now,
            "mcnemar_p": compute_mcnemar_p(only_before, only_now),
        }
    return result
