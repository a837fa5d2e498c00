"""Findings of the doctor, and those that the tokens of a record show by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.rollouts.repeated_samples import LIMIT, bound_groups, bound_probability
from megatron_grpo.verification.doctor.evidence import Evidence, Rollout, join_spans
from megatron_grpo.verification.doctor.law import compute_residual
from megatron_grpo.verification.doctor.suspects.side import Cause, Side


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of two lists of log-probabilities, in nats."""

    mean: float
    """Mean absolute difference."""
    worst: float
    """Largest absolute difference."""

    @staticmethod
    def measure(first: Tensor, second: Tensor) -> Distance:
        """Measure the distance of two [tokens]; 0 without tokens."""
        if not len(first):
            return Distance(0.0, 0.0)
        apart = compute_residual(first, second)
        return Distance(float(apart.mean()), float(apart.max()))

    def is_within(self, rounding: Distance) -> bool:
        """Whether this distance can be rounding."""
        return self.mean <= rounding.mean and self.worst <= rounding.worst


FLOAT32 = Distance(3e-5, 1e-3)
"""Rounding of a forward pass in float32. Layouts of small models differ by at most 2e-5 at a token
(`verification.tolerances`); engines have other kernels, so they are allowed more at single tokens."""
MARGIN = 3.0
"""A side in bfloat16 may be this many times as far from float32 as transformers in bfloat16 is."""


def measure_rounding(exact: Tensor, rounded: Tensor | None) -> Distance:
    """Measure the distance that rounding explains.

    Args:
        exact: [tokens]: the oracle's log-probabilities in float32.
        rounded: [tokens]: the oracle's in the side's type; None: the side's type is float32.
    """
    if rounded is None:
        return FLOAT32
    measured = Distance.measure(exact, rounded)
    return Distance(max(MARGIN * measured.mean, FLOAT32.mean), max(MARGIN * measured.worst, FLOAT32.worst))


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why log-probabilities differ."""

    name: str
    cause: Cause
    text: str
    key: str
    """The configuration key to change, or another remedy."""
    before: Distance | None = None
    """Distance of the side's record from the oracle; None: the record itself shows the mistake."""
    after: Distance | None = None
    """That distance under this explanation."""
    others: list[str] = field(default_factory=list)
    """Texts of other explanations, each with the share of the difference that it explains."""
    engines: list[int] = field(default_factory=list)
    """Numbers of the engines whose rollouts the finding explains; empty: all engines, or none is recorded."""

    @property
    def explained(self) -> float:
        """Share of the mean difference explained, 0 to 1; 1 without distances."""
        if self.before is None or self.after is None:
            return 1.0
        return max(0.0, 1.0 - self.after.mean / self.before.mean) if self.before.mean else 0.0


STOP_KEY = "generation.stop_token_ids and the model's eos_token_id; an environment's own tokens are not sampled ones"


def find_token_mistakes(
    evidence: Evidence, stops: frozenset[int], *, stop_strings: bool, samples: int | None
) -> Iterator[Finding]:
    """Find mistakes that the record's tokens show by themselves.

    Args:
        evidence: the record.
        stops: tokens that end a response.
        stop_strings: whether texts end responses too.
        samples: recorded rollouts of each prompt; None: the run kept some of them.
    """
    if samples is not None:
        yield from _find_missing_rollouts(evidence, samples)
    # With several turns a limit or the environment may rightly end a rollout after a complete response, so how rollouts
    # end is judged only in tasks of one turn.
    multi_turn_tasks = {row["task_name"] for row in evidence.rows if len(join_spans(row)) > 1}
    single = [row for row in evidence.rows if row["task_name"] not in multi_turn_tasks]

    def is_stopped(row: dict[str, Any]) -> bool:
        return int(row["token_ids"][row["spans"][-1][1] - 1]) in stops

    def is_beyond_stop(row: dict[str, Any]) -> bool:
        return any(stops & set(row["token_ids"][start : end - 1].tolist()) for start, end, _ in row["spans"])

    def count_surplus(row: dict[str, Any]) -> int:
        return sum(end - start for start, end, _ in row["spans"]) - len(row["logprobs"])

    def has_unsampled_stop(row: dict[str, Any]) -> bool:
        return count_surplus(row) == 1 and is_stopped(row)

    rows = evidence.rows
    beyond_stop, unsampled_stop = list(filter(is_beyond_stop, rows)), list(filter(has_unsampled_stop, rows))
    lost_tokens = [row for row in rows if count_surplus(row) and not has_unsampled_stop(row)]
    cut_at_stop = [row for row in single if row["stop_reason"] == "length" and is_stopped(row)]
    # Without stop tokens, or with stop strings, a response may rightly stop at any token.
    no_stop = [
        row for row in single if row["stop_reason"] == "stop" and stops and not (stop_strings or is_stopped(row))
    ]
    for wrong, name, mistake in (
        (beyond_stop, "stop_token", "has tokens in the loss behind a stop token"),
        (cut_at_stop, "stop_token", "ends in a stop token, and was ended by a limit of its length"),
        (unsampled_stop, "stop_token", "counts a stop token as sampled that has no log-probability"),
        (lost_tokens, "lost_tokens", "has more or fewer sampled tokens than log-probabilities"),
        (no_stop, "truncated", "has stopped without a stop token"),
    ):
        if wrong:
            first = f"prompt {wrong[0]['prompt_idx']}, sample {wrong[0]['sample']}"
            text = f"{len(wrong)} of {len(rows)} rollouts: each {mistake} (first: {first})"
            yield Finding(name, "tokens", text, STOP_KEY if name == "stop_token" else LOST)


def _find_missing_rollouts(evidence: Evidence, samples: int) -> Iterator[Finding]:
    """Find groups that lack rollouts, or have one twice."""
    groups: dict[int, list[int]] = {}
    for group, sample in evidence.members:
        groups.setdefault(group, []).append(sample)
    wrong = {group: numbers for group, numbers in groups.items() if sorted(numbers) != list(range(samples))}
    if wrong:
        group, numbers = next(iter(wrong.items()))
        count = sum(map(len, groups.values()))
        recorded = ", ".join(map(str, sorted(numbers)))
        text = f"the file has {count} of the {samples * len(groups)} rollouts of its {len(groups)} groups;"
        text += f" group {group} has samples {recorded}"
        yield Finding("damaged_record", "record", text, LOST)


def find_repeated_samples(evidence: Evidence) -> Iterator[Finding]:
    """Find samples of a prompt that are equal where chance does not explain it."""
    groups: dict[int, dict[int, dict[str, Any]]] = {}
    for row in evidence.rows:
        groups.setdefault(row["group"], {})[row["sample"]] = row
    bounds, largest, repeated = list[float](), 1, 0
    for rows in groups.values():
        equal: dict[tuple[int, ...], list[float]] = {}
        for row in rows.values():
            logprob = float(row["logprobs"].sum(dtype="float64"))
            equal.setdefault(tuple(row["token_ids"].tolist()), []).append(logprob)
        group_bounds = [bound_probability(sums, len(rows)) for sums in equal.values() if all(map(math.isfinite, sums))]
        bounds.append(min([0.0, *group_bounds]))
        repeated += bounds[-1] < 0
        largest = max(largest, *(len(sums) for sums in equal.values()))
    bound = min([0.0, *bounds, bound_groups(bounds)]) if bounds else 0.0
    if bound < LIMIT:
        text = (
            f"samples of a prompt have the same tokens in {repeated} of {len(groups)} groups, up to {largest} samples "
            f"in one; independent draws do so with a probability below e^{bound:.0f}: they are copies, or had one seed"
        )
        yield Finding("repeated_samples", "sampling", text, SEED)


SEED = "what sets the seed of each request: an agent's `seed`, a changed engine or proxy; each sample needs its own"
LOST = "rollouts were changed after they were sampled; record them again, and look at what an environment or agent adds"


def find_unsampled_stops(
    evidence: Evidence, recorded: Tensor, base: Tensor, stops: frozenset[int], rounding: Distance
) -> Finding | None:
    """Find that only stop tokens at the end of rollouts differ.

    Args:
        evidence: the record.
        recorded: [tokens], float32: recorded log-probabilities.
        base: [tokens], float32: the oracle's.
        stops: tokens that end a response.
        rounding: distance that rounding explains.
    """
    sampled = torch.cat([tokens.ids[tokens.chosen] for tokens in evidence.tokens])
    ending = evidence.last & torch.isin(sampled, torch.tensor(sorted(stops)))
    apart = ending & (compute_residual(recorded, base) > rounding.worst)
    if not apart.any() or not Distance.measure(recorded[~apart], base[~apart]).is_within(rounding):
        return None
    text = (
        f"{int(apart.sum())} of {int(ending.sum())} stop tokens that end a rollout are in the loss with a "
        "log-probability that the model does not give them, and all other tokens agree: these tokens were not sampled"
    )
    before, after = Distance.measure(recorded, base), Distance.measure(recorded[~apart], base[~apart])
    return Finding("stop_token", "tokens", text, STOP_KEY, before, after)


def find_first_apart(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float
) -> tuple[str, float] | None:
    """Find the first point at which hidden states differ; None: nowhere.

    Args:
        ours: [tokens, width] by point (`verification.doctor.layer_outputs`).
        theirs: hidden states of another program, by point, in order; only points of both are compared.
        tolerance: largest relative difference (of norms) that rounding explains.

    Returns:
        The point and its relative difference.
    """
    for point in theirs:
        if point in ours:
            apart = float((ours[point].float() - theirs[point].float()).norm() / theirs[point].float().norm())
            if not apart <= tolerance:
                return point, apart
    return None


def find_rollouts_apart(side: Side, base: Tensor, rounding: Distance) -> list[int]:
    """Find the rollouts that differ from the oracle beyond rounding.

    Args:
        side: the record.
        base: [tokens], float32: the oracle's log-probabilities.
        rounding: distance that rounding explains.
    """
    pairs = zip(side.recorded.split(side.lengths), base.split(side.lengths), strict=True)
    return [
        number
        for number, (recorded, predicted) in enumerate(pairs)
        if not Distance.measure(recorded, predicted).is_within(rounding)
    ]


def group_by_engine(numbers: Sequence[int], rollouts: Sequence[Rollout]) -> dict[int, list[int]]:
    """Group the numbers of rollouts by their engine; empty if one is not recorded."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        engine = rollouts[number].row.get("engine")
        if engine is None:
            return {}
        groups.setdefault(engine, []).append(number)
    return dict(sorted(groups.items()))


def describe_engines(engines: Sequence[int], apart: int, rollouts: Sequence[Rollout]) -> str:
    """Describe the engines of the `apart` rollouts that differ; empty without engines."""
    if not engines:
        return ""
    size = sum(rollout.row["engine"] in engines for rollout in rollouts)
    share = "all" if size == apart else f"{apart} of the {size}"
    return f": {share} of engine{'s' * (len(engines) > 1)} {', '.join(map(str, engines))}"


def describe_apart(lengths: Sequence[int], recorded: Tensor, base: Tensor, rounding: Distance) -> str:
    """Describe where a record differs; `lengths`: tokens of each rollout."""
    apart = compute_residual(recorded, base) > rounding.worst
    pieces: Sequence[Tensor] = apart.split(list(lengths))
    first = [int(piece.nonzero()[0]) for piece in pieces if piece.any()]
    rollouts = f"{len(first)} of {len(lengths)} rollouts"
    if not first:
        return f"every token differs a little, none by more than {rounding.worst:.1g}"
    text = f"{float(apart.float().mean()):.1%} of the tokens, in {rollouts}, differ by more than {rounding.worst:.1g};"
    text += f" the first in a rollout is token {min(first)} of its response"
    return text


CORRELATION = 0.3
"""Least correlation with the differences of transformers in bfloat16 by which a record counts as rounded."""
BOTH_SIGNS = 0.15
"""Least share of differences above zero, and of differences below zero, by which it does."""


def is_rounding(side: Side, base: Tensor, coarse: Tensor) -> bool:
    """True if a record differs from float32 as bfloat16 does.

    Args:
        side: the record.
        base: [tokens], float32: the oracle in float32.
        coarse: [tokens], float32: the oracle in bfloat16.
    """
    # Rounding of the same weights and states moves a token in the same direction in every program, so the differences
    # correlate. Differences caused by a wrong tensor do not correlate, even if they are as large.
    gap, rounding = side.recorded - base, coarse - base
    if len(gap) < 2 or not gap.isfinite().all():
        return False
    sizes = [float(gap.abs().mean()), float(rounding.abs().mean())]
    worst = [float(gap.abs().max()), float(rounding.abs().max())]
    if not all(1 / 3 < first / max(second, 1e-9) < 3 for first, second in (sizes, worst)):
        return False
    above = float((gap > 0).float().mean())
    everywhere = all(float(piece.abs().mean()) > sizes[1] / 10 for piece in gap.split(side.lengths) if len(piece) > 1)
    correlation = float(torch.corrcoef(torch.stack([gap, rounding]))[0, 1])
    enough = max(CORRELATION, 4 / len(gap) ** 0.5)
    return everywhere and BOTH_SIGNS < above < 1 - BOTH_SIGNS and correlation > enough


def drop_repetitions(findings: list[Finding]) -> list[Finding]:
    """Drop repeated findings; the one that explains a distance stays."""
    findings_by_name: dict[tuple[str, bool, tuple[int, ...]], Finding] = {}
    for finding in findings:
        name = finding.name, finding.text.startswith("the trainer "), tuple(finding.engines)
        if name not in findings_by_name or (findings_by_name[name].before is None and finding.before is not None):
            findings_by_name[name] = finding
    return list(findings_by_name.values())


def describe_other_versions(evidence: Evidence) -> tuple[str, int]:
    """Describe tokens of other versions, and count rollouts without examined tokens.

    The text is empty if there are no such tokens.
    """
    counts: dict[int, int] = {}
    dropped = 0
    for row in evidence.rows:
        dropped += all(version != evidence.version for _, _, version in row["spans"])
        for start, end, version in row["spans"]:
            if version != evidence.version:
                counts[version] = counts.get(version, 0) + end - start
    if not counts:
        return "", 0
    listed = ", ".join(f"{count} of version {version}" for version, count in sorted(counts.items()))
    text = (
        f"{sum(counts.values())} sampled tokens were not scored on both sides, because version {evidence.version} did "
        f"not sample them: {listed}; {dropped} rollouts have no other tokens"
    )
    return text, dropped


@dataclass(slots=True)
class Diagnosis:
    """The result of an examination."""

    step: int
    version: int
    """Weight version that sampled the tokens."""
    rollouts: int
    tokens: int
    """Rollouts and sampled tokens that were scored."""
    unseen_rollouts: int = 0
    """Rollouts of the step that were not scored because other versions sampled them."""
    recorded_error: float | None = None
    """`token_mult_prob_error` of the step, as the run recorded it; NaN: it was not finite; None: it is not recorded."""
    recorded_worst: float | None = None
    """`token_mult_prob_error_max` of the step, as the run recorded it."""
    gap: Distance = field(default_factory=lambda: Distance(0.0, 0.0))
    """Distance of the engine's log-probabilities from the trainer's, at the scored tokens."""
    error: float = 1.0
    """Mean of exp(abs(trainer - engine)) of the scored tokens, computed by this examination."""
    sides: dict[str, tuple[Distance, Distance]] = field(default_factory=dict)
    """Distance of each side from the oracle, and the distance that rounding explains."""
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Facts that are not mistakes, and checks that could not be made, with the reason."""
