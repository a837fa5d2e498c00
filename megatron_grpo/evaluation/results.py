"""From scored responses to results.json: each set by itself, and compared with an earlier evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_grpo.data.interfaces import REFERENCE, DatumSpec
from megatron_grpo.data.trajectory import Outcome, Trajectory
from megatron_grpo.environments.math_answers import final_answer
from megatron_grpo.evaluation.estimates import (
    bootstrap_interval,
    consensus_at_k,
    mcnemar,
    pass_at_k,
    wilcoxon,
)
from megatron_grpo.run.validation import held_out_metrics

Row = dict[str, Any]
"""A line of samples.jsonl."""


@dataclass(slots=True)
class Answered:
    """Prompts of a set with what came of them, prompt by prompt in one order."""

    prompts: list[DatumSpec]
    outcomes: list[list[Outcome]]
    rows: list[list[Row]]


def sample_row(name: str, prompt: DatumSpec, one: Trajectory) -> Row:
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


def vote_of(response: str) -> str | None:
    """The answer that a response votes for: its last box, else its last line; None: it is empty."""
    boxed = final_answer(response)
    if boxed.startswith("\\boxed{"):
        return "".join(boxed.split())
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else None


def set_results(answered: Answered, ks: Sequence[int]) -> dict[str, Any]:
    """The figures of one set.

    Args:
        answered: prompts of the set, and the responses to them.
        ks: for pass@k and cons@k.

    Returns:
        prompts; accuracy and reward, means over prompts of the mean over a prompt's responses, each with the interval
        of a bootstrap over prompts; for each k pass@k and cons@k over the prompts of which at least k responses could
        be judged, and how many those were; metrics: what validation reports of the same responses.
    """
    results: dict[str, Any] = {"prompts": len(answered.prompts)}
    judged = [[row for row in rows if row["correct"] is not None] for rows in answered.rows]
    right = [[bool(row["correct"]) for row in rows] for rows in judged]
    if any(right):
        results["accuracy"] = asdict(bootstrap_interval([fmean(one) for one in right if one]))
    rewards = [[row["reward"] for row in rows if row["reward"] is not None] for rows in answered.rows]
    if any(rewards):
        results["reward"] = asdict(bootstrap_interval([fmean(one) for one in rewards if one]))
    for k in ks:
        enough = [number for number, one in enumerate(right) if len(one) >= k]
        if not enough:
            continue
        passed = [pass_at_k(len(right[number]), sum(right[number]), k) for number in enough]
        agreed = [
            consensus_at_k([vote_of(row["response"]) for row in judged[number]], right[number], k) for number in enough
        ]
        results[f"pass@{k}"] = {**asdict(bootstrap_interval(passed)), "prompts": len(enough)}
        results[f"cons@{k}"] = {**asdict(bootstrap_interval(agreed)), "prompts": len(enough)}
    return {**results, "metrics": held_out_metrics(answered.prompts, answered.outcomes)}


def comparison(rows: Sequence[Row], before: Sequence[Row]) -> dict[str, Any]:
    """What changed on the prompts that two evaluations share, set by set.

    Prompts are the same when their set, row and text are. A prompt's accuracy is the mean over its responses.

    Args:
        rows: samples of this evaluation.
        before: samples of the earlier one.

    Returns:
        Of each set: prompts that both have; accuracy of both; difference, with its interval from a bootstrap over
        prompts (of pairs); the p-value of Wilcoxon's test; and with one response to each prompt only_before, only_now
        (prompts that one alone got right) with the p-value of McNemar's exact test.
    """
    now, then = by_prompt(rows), by_prompt(before)
    sets = list(dict.fromkeys(key[0] for key in now))
    return {name: _compared([key for key in now if key[0] == name and key in then], now, then) for name in sets}


PromptKey = tuple[str, int, str]


def by_prompt(rows: Sequence[Row]) -> dict[PromptKey, list[bool]]:
    """Whether each judged response is right, by set, row and text of the prompt."""
    found: dict[PromptKey, list[bool]] = {}
    for row in rows:
        if row["correct"] is not None:
            key = (row["set"], row["prompt_idx"], json.dumps(row["prompt"]))
            found.setdefault(key, []).append(bool(row["correct"]))
    return found


def _compared(
    keys: Sequence[PromptKey], now: Mapping[PromptKey, list[bool]], then: Mapping[PromptKey, list[bool]]
) -> dict[str, Any]:
    if not keys:
        return {"prompts": 0}
    pairs = [(fmean(then[key]), fmean(now[key])) for key in keys]
    differences = [after - before for before, after in pairs]
    result: dict[str, Any] = {
        "prompts": len(keys),
        "accuracy_before": fmean(before for before, _ in pairs),
        "accuracy_now": fmean(after for _, after in pairs),
        "difference": asdict(bootstrap_interval(differences)),
        "wilcoxon_p": wilcoxon(differences),
    }
    if all(len(then[key]) == len(now[key]) == 1 for key in keys):
        only_before, only_now = differences.count(-1.0), differences.count(1.0)
        result |= {"only_before": only_before, "only_now": only_now, "mcnemar_p": mcnemar(only_before, only_now)}
    return result


def read_samples(folder: Path, file: str) -> list[Row]:
    """The samples of an evaluation.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / file
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
