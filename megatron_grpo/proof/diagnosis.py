"""The reasoning of the doctor: which explanation reproduces the recorded log-probabilities, to rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.proof.evidence import Evidence, joined_spans
from megatron_grpo.proof.suspects import Cause, Prediction, Side, Suspect, residual


@dataclass(frozen=True, slots=True)
class Distance:
    """How far log-probabilities are from others."""

    mean: float
    """Mean absolute difference."""
    worst: float
    """Largest absolute difference."""

    @staticmethod
    def between(one: Tensor, other: Tensor) -> Distance:
        """The distance of two [tokens] of log-probabilities; 0 without tokens."""
        if not len(one):
            return Distance(0.0, 0.0)
        apart = residual(one, other)
        return Distance(float(apart.mean()), float(apart.max()))

    def within(self, rounding: Distance) -> bool:
        """Whether this distance can be rounding."""
        return self.mean <= rounding.mean and self.worst <= rounding.worst


FLOAT32 = Distance(3e-5, 1e-3)
"""Rounding of a forward pass in float32. Layouts differ by at most 2e-5 at a token (`proof.ranks.TOLERANCES`); engines
have other kernels, so they are allowed more at single tokens."""
MARGIN = 3.0
"""A program in bfloat16 may be this many times as far from float32 as transformers in bfloat16 is."""


def rounding_of(exact: Tensor, rounded: Tensor | None) -> Distance:
    """The distance that rounding explains.

    Args:
        exact: [tokens]: log-probabilities in float32.
        rounded: [tokens]: those of the same program in the side's type; None: the side's type is float32.
    """
    if rounded is None:
        return FLOAT32
    seen = Distance.between(exact, rounded)
    return Distance(max(MARGIN * seen.mean, FLOAT32.mean), max(MARGIN * seen.worst, FLOAT32.worst))


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

    @property
    def explained(self) -> float:
        """Share of the mean difference that this explains, 0 to 1; 1 for what the record itself shows."""
        if self.before is None or self.after is None:
            return 1.0
        return max(0.0, 1.0 - self.after.mean / self.before.mean) if self.before.mean else 0.0


EXPLAINED = 0.8
"""Least share of the mean difference that an accepted explanation removes, unless the rest is rounding."""


def best_explanation(
    side: str, recorded: Tensor, base: Tensor, groups: Iterable[Iterable[Prediction]], rounding: Distance
) -> Finding | None:
    """The suspect that comes closest to the record; None if none explains it.

    Groups are tried in order, the cheap and frequent ones first. The search ends after the first group with a
    suspect that reproduces the record to rounding; the closest suspect so far is taken.

    Args:
        side: the name of the side, with which the text begins.
        recorded: [tokens], float32: the record.
        base: [tokens], float32: the oracle without a suspect.
        groups: predictions of suspects.
        rounding: distance that rounding explains.
    """
    before = Distance.between(recorded, base)
    best: tuple[Suspect, Distance] | None = None
    for group in groups:
        for suspect, predicted in group:
            after = Distance.between(recorded, predicted)
            if best is None or after.mean < best[1].mean:
                best = suspect, after
        if best is not None and best[1].within(rounding):
            break
    if best is None:
        return None
    suspect, after = best
    finding = Finding(suspect.name, suspect.cause, f"the {side} {suspect.text}", suspect.key, before, after)
    return finding if after.within(rounding) or finding.explained >= EXPLAINED else None


STOP_KEY = "generation.stop_token_ids and the model's eos_token_id; an environment's own tokens are not sampled ones"


def record_findings(evidence: Evidence, stops: frozenset[int], *, stop_strings: bool) -> Iterator[Finding]:
    """Mistakes that the tokens of the record show by themselves.

    Args:
        evidence: the record.
        stops: tokens that end a response.
        stop_strings: whether texts end responses too.
    """
    # In an environment of several turns, a limit or the environment may end a rollout behind a response's own end.
    of_turns = {row["task_name"] for row in evidence.rows if len(joined_spans(row)) > 1}
    single = [row for row in evidence.rows if row["task_name"] not in of_turns]

    def stopped(row: dict[str, Any]) -> bool:
        return int(row["token_ids"][row["spans"][-1][1] - 1]) in stops

    def beyond(row: dict[str, Any]) -> bool:
        return any(stops & set(row["token_ids"][start : end - 1].tolist()) for start, end, _ in row["spans"])

    def surplus(row: dict[str, Any]) -> int:
        return sum(end - start for start, end, _ in row["spans"]) - len(row["logprobs"])

    checks = (
        ("stop_token", [one for one in evidence.rows if beyond(one)], "has tokens in the loss behind a stop token"),
        (
            "stop_token",
            [one for one in single if one["stop_reason"] == "length" and stopped(one)],
            "ends in a stop token, and was ended by a limit of its length",
        ),
        (
            "stop_token",
            [one for one in evidence.rows if surplus(one) == 1 and stopped(one)],
            "counts a stop token as sampled that has no log-probability",
        ),
        (
            "lost_tokens",
            [one for one in evidence.rows if surplus(one) and not (surplus(one) == 1 and stopped(one))],
            "has more or fewer sampled tokens than log-probabilities",
        ),
        (
            "truncated",
            [one for one in single if one["stop_reason"] == "stop" and stops and not (stop_strings or stopped(one))],
            "has stopped without a stop token",
        ),
    )
    for name, wrong, text in checks:
        if wrong:
            first = f"prompt {wrong[0]['prompt_idx']}, sample {wrong[0]['sample']}"
            found = f"{len(wrong)} of {len(evidence.rows)} rollouts: each {text} (first: {first})"
            yield Finding(name, "tokens", found, STOP_KEY if name == "stop_token" else LOST)


LOST = "rollouts were changed after they were sampled; record them again, and look at what an environment or agent adds"


def stop_token_finding(
    evidence: Evidence, recorded: Tensor, base: Tensor, stops: frozenset[int], rounding: Distance
) -> Finding | None:
    """A finding if the record differs from the oracle nowhere but at stop tokens that end a rollout.

    Args:
        evidence: the record.
        recorded: [tokens], float32: recorded log-probabilities.
        base: [tokens], float32: the oracle's.
        stops: tokens that end a response.
        rounding: distance that rounding explains.
    """
    sampled = torch.cat([one.ids[one.places] for one in evidence.tokens])
    ending = evidence.last & torch.isin(sampled, torch.tensor(sorted(stops)))
    apart = ending & (residual(recorded, base) > rounding.worst)
    if not apart.any() or not Distance.between(recorded[~apart], base[~apart]).within(rounding):
        return None
    text = (
        f"{int(apart.sum())} of {int(ending.sum())} stop tokens that end a rollout are in the loss with a "
        "log-probability that the model does not give them, and all other tokens agree: these tokens were not sampled"
    )
    before, after = Distance.between(recorded, base), Distance.between(recorded[~apart], base[~apart])
    return Finding("stop_token", "tokens", text, STOP_KEY, before, after)


def first_apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> tuple[str, float] | None:
    """The first point, in the order of computation, at which hidden states differ; None: they do not.

    Args:
        ours: [tokens, width] by point (`proof.hidden_states`).
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


def rollouts_apart(side: Side, base: Tensor, rounding: Distance) -> list[int]:
    """Numbers of the rollouts whose record differs from the oracle by more than rounding explains.

    Args:
        side: the record.
        base: [tokens], float32: the oracle's log-probabilities.
        rounding: distance that rounding explains.
    """
    pairs = zip(side.recorded.split(side.lengths), base.split(side.lengths), strict=True)
    return [number for number, (own, other) in enumerate(pairs) if not Distance.between(own, other).within(rounding)]


def where_apart(lengths: Sequence[int], recorded: Tensor, base: Tensor, rounding: Distance) -> str:
    """Where a record that nothing explains differs from the oracle, as text; `lengths`: tokens of each rollout."""
    apart = residual(recorded, base) > rounding.worst
    pieces: Sequence[Tensor] = apart.split(list(lengths))
    first = [int(piece.nonzero()[0]) for piece in pieces if piece.any()]
    rollouts = f"{len(first)} of {len(lengths)} rollouts"
    text = f"{float(apart.float().mean()):.1%} of the tokens, in {rollouts}, differ by more than {rounding.worst:.1g}"
    if not first:
        return f"every token differs a little, none by more than {rounding.worst:.1g}"
    return f"{text}; the first in a rollout is token {min(first)} of its response"
