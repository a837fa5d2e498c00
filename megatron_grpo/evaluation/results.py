"""Computes the estimates of results.json: figures of each set, and comparisons of evaluations."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

import numpy as np

from megatron_grpo.algorithms.validation import compute_held_out_metrics
from megatron_grpo.batch.trajectory import Outcome, Trajectory
from megatron_grpo.data.math_text import is_letter, rewrite_answer
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.environments.math_answers import find_final_answer

SAMPLES_FILE = "samples.jsonl"
RESAMPLES = 10_000
"""Resamples of a bootstrap, enough for percentiles that vary by about a hundredth of the interval."""
LEVEL = 0.95
"""Confidence level of every interval."""
_SEED = 0  # of the bootstrap, fixed so that equal samples have equal intervals
_SAYS = re.compile(r"\banswer\b(?:\s+is\b)?[\s:*]*", re.IGNORECASE)
_AROUND_VOTES = " \t$*`"  # marks of LaTeX and Markdown around an answer
_VOTED_FRACTION = re.compile(r"^([+-]?)\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))$")
_VOTED_NUMBER = re.compile(
    r"([+-]?(?:(?:\d{1,3}(?:,\d{3}){1,99}|\d{1,999})(?:\.\d{1,999})?|\.\d{1,999}))(?:/([1-9]\d{0,999}))?"
)
_DIGITS = 12  # of rounded differences of accuracies: 1 - 2/3 and 2/3 - 1/3 differ only in the 16th


def estimate_pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate how likely k samples of a prompt include a right one.

    Samples are drawn without replacement: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

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
    """Estimate how often the majority answer of k samples is right.

    The mean over runs of k consecutive samples; a remainder of fewer than k is not used. Among answers with equal
    votes, the first wins.

    Args:
        answers: answer of each sample; equal texts are one answer, None is not a vote.
        right: True for each right sample.
        k: number of samples that vote.

    Raises:
        ValueError: there are fewer than k samples.
    """
    if len(answers) < k:
        raise ValueError(f"cons@{k} needs at least {k} samples of a prompt, and there are {len(answers)}")
    majorities = []
    for begin in range(0, len(answers) - k + 1, k):
        votes = Counter(answer for answer in answers[begin : begin + k] if answer is not None)
        # Of answers with equal votes most_common gives the first.
        majorities.append(bool(votes) and right[answers.index(votes.most_common(1)[0][0], begin)])
    return fmean(majorities)


def compute_bootstrap_interval(values: Sequence[float]) -> dict[str, float]:
    """Compute a mean with its percentile-bootstrap interval (Efron 1979).

    Args:
        values: a value per prompt, such as the mean over its samples. Prompts are resampled, not samples, since the
            samples of a prompt depend on each other.

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
    """Compute the two-sided p-value of McNemar's exact test (1947).

    The hypothesis is that two models are right equally often.

    Args:
        only_first: number of prompts that only the first model got right.
        only_second: number of prompts that only the second model got right.
    """
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, count) for count in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**discordant))


def compute_wilcoxon_p(differences: Sequence[float]) -> float:
    """Compute the two-sided p-value of Wilcoxon's signed-rank test (1945).

    The hypothesis is that differences are symmetric around 0. Uses the normal approximation, with the variance
    corrected for ties; differences of 0 are left out. Differences that agree to 12 decimals are tied, because 1 - 2/3
    and 2/3 - 1/3 differ only by rounding.

    Args:
        differences: for each prompt, the accuracy of one model minus that of the other.
    """
    values = np.round(np.asarray(differences, dtype=np.float64), _DIGITS)
    values = values[values != 0.0]
    count = len(values)
    if not count:
        return 1.0
    _, values_index, ties = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[values_index]  # equal values share the mean of their ranks
    positive = float(ranks[values > 0].sum())
    variance = count * (count + 1) * (2 * count + 1) / 24 - float((ties**3 - ties).sum()) / 48
    return math.erfc(abs(positive - count * (count + 1) / 4) / math.sqrt(2 * variance))


Row = dict[str, Any]
"""The content of a line of samples.jsonl."""


@dataclass(slots=True)
class AnsweredSet:
    """Prompts of a set, with their outcomes and samples in equal order."""

    prompts: list[DatumSpec]
    outcomes: list[list[Outcome]]
    rows: list[list[Row]]


def make_sample_row(name: str, prompt: DatumSpec, trajectory: Trajectory) -> Row:
    """Make the line of samples.jsonl for a response."""
    return {
        "set": name,
        "prompt_idx": prompt["idx"],
        "sample": trajectory.sample,
        "task": prompt["task_name"],
        "prompt": prompt["prompt"],
        "reference": prompt["extra_env_info"].get(REFERENCE),
        "response": trajectory.response,
        "correct": trajectory.correct,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "tokens": trajectory.response_tokens,
        "stop_reason": trajectory.stop_reason,
        "fault": trajectory.fault,
        "failure": trajectory.failure,
    }


def find_vote(response: str) -> str | None:
    """Find the answer that a response votes for.

    It is the last \\boxed{...}, else what the last line says the answer is, else that line. Equal numbers are one vote,
    such as 0.5, 1/2 and \\frac{1}{2}. Other answers are votes by their text.
    """
    final, lines = find_final_answer(response), response.strip().splitlines()
    is_boxed = final.startswith("\\boxed{")
    if is_boxed:
        answer = final.removeprefix("\\boxed{").removesuffix("}")
    elif lines:
        answer = _SAYS.split(lines[-1])[-1].rstrip(_AROUND_VOTES + ".") or lines[-1]
    else:
        return None
    text = ("" if is_boxed else " ").join(rewrite_answer(answer.strip(_AROUND_VOTES)).text.split())
    if is_letter(text):
        return text.strip("()")
    number = _VOTED_NUMBER.fullmatch(_VOTED_FRACTION.sub(r"\1\2\3/\4\5", text))
    return text if number is None else str(Fraction(number[1].replace(",", "")) / int(number[2] or 1))


def compute_set_results(answered: AnsweredSet, ks: Sequence[int]) -> dict[str, Any]:
    """Compute the figures of a set.

    Args:
        answered: prompts of the set, and the responses to them.
        ks: the values of k for pass@k and cons@k.

    Returns:
        prompts: their number.
        accuracy, reward: mean over prompts of the mean over a prompt's responses, with a bootstrap interval.
        pass@k, cons@k: the same over the prompts with at least k judged responses, and the number of these prompts.
        metrics: the metrics that validation reports for the same responses.
    """
    results: dict[str, Any] = {"prompts": len(answered.prompts)}
    # Responses without a verdict count neither as right nor as wrong.
    judged = [[row for row in rows if row["correct"] is not None] for rows in answered.rows]
    right = [[bool(row["correct"]) for row in rows] for rows in judged]
    if any(right):
        results["accuracy"] = compute_bootstrap_interval([fmean(flags) for flags in right if flags])
    rewards = [[row["reward"] for row in rows if row["reward"] is not None] for rows in answered.rows]
    if any(rewards):
        results["reward"] = compute_bootstrap_interval([fmean(values) for values in rewards if values])
    for k in ks:
        eligible = [(rows, flags) for rows, flags in zip(judged, right, strict=True) if len(flags) >= k]
        if not eligible:
            continue
        passes = [estimate_pass_at_k(len(flags), sum(flags), k) for _, flags in eligible]
        consensus = [
            estimate_consensus_at_k([find_vote(row["response"]) for row in rows], flags, k) for rows, flags in eligible
        ]
        results[f"pass@{k}"] = {**compute_bootstrap_interval(passes), "prompts": len(eligible)}
        results[f"cons@{k}"] = {**compute_bootstrap_interval(consensus), "prompts": len(eligible)}
    return {**results, "metrics": compute_held_out_metrics(answered.prompts, answered.outcomes)}


def compare_evaluations(rows: Sequence[Row], before: Sequence[Row]) -> dict[str, Any]:
    """Compare two evaluations on their common prompts, by set.

    Prompts are equal if their set, row and text are. A prompt's accuracy is the mean over its responses.

    Args:
        rows: samples of this evaluation.
        before: samples of the earlier evaluation.

    Returns:
        For each set: the number of common prompts; both accuracies; their difference, with a paired bootstrap interval
        over prompts; the p-value of Wilcoxon's test; and with one response to each prompt, only_before and only_now
        (prompts that only this evaluation got right) with the p-value of McNemar's exact test.
    """
    # Paired by prompt, because the differences of equal prompts vary less than the difference of two means.
    now, then = _collect_by_prompt(rows), _collect_by_prompt(before)
    pairs: dict[str, list[tuple[list[bool], list[bool]]]] = {name: [] for name, _, _ in now}
    for key in now:
        if key in then:
            pairs[key[0]].append((then[key], now[key]))
    return {name: _compare(responses) for name, responses in pairs.items()}


def _collect_by_prompt(rows: Sequence[Row]) -> dict[tuple[str, int, str], list[bool]]:
    right: dict[tuple[str, int, str], list[bool]] = {}
    for row in rows:
        if row["correct"] is not None:
            key = (row["set"], row["prompt_idx"], json.dumps(row["prompt"]))
            right.setdefault(key, []).append(bool(row["correct"]))
    return right


def _compare(responses: Sequence[tuple[list[bool], list[bool]]]) -> dict[str, Any]:
    """Compare a set; `responses`: by prompt, right or wrong before and now."""
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
    # McNemar's test counts prompts that changed sides, which needs a single verdict on each prompt.
    if all(len(before) == len(now) == 1 for before, now in responses):
        only_before, only_now = differences.count(-1.0), differences.count(1.0)
        result |= {
            "only_before": only_before,
            "only_now": only_now,
            "mcnemar_p": compute_mcnemar_p(only_before, only_now),
        }
    return result
