"""Records whose numbers were changed after they were computed: which rollout, and which token of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.diagnosis import Distance, Finding
from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.law import Tokens, compute_residual
from megatron_grpo.verification.doctor.suspects.side import Side

CHANGED = "the file of rollouts was changed after it was written; record the step again"
WRITER = "what writes or converts the log-probabilities of the record"
MOST_NAMED_TOKENS = 2
"""Most edited numbers of a rollout; if more differ, an edited token id, or another cause, is behind it."""
MOST_IDS = 64
"""Most token ids that are tried in place of an edited one: those whose log-probability is nearest to the record."""
CLIPPED_TOLERANCE = 1e-3
"""Largest difference, in nats, of a clipped record from the oracle's numbers clipped alike."""
DIGITS = 4
"""Most decimal places of a record that counts as rounded; float32 has about seven."""


def find_damage(side: Side, base: Tensor, rounding: Distance) -> Finding | None:
    """Find what was done to all numbers of a record, if anything.

    Args:
        side: the record.
        base: [tokens], float32: the oracle's log-probabilities.
        rounding: distance that rounding explains.
    """
    for examine in (_find_impossible, _find_coarse, _find_other_units, _find_shifted, _find_exchanged):
        finding = examine(side, base, rounding)
        if finding is not None:
            return finding
    return None


def _find_coarse(side: Side, base: Tensor, _rounding: Distance) -> Finding | None:
    # Numbers of few decimal places, clipped numbers, or numbers of a 16-bit type.
    recorded = side.recorded
    if len(recorded) < 8 or not recorded.isfinite().all() or not recorded.any():
        return None
    apart = compute_residual(recorded, base)
    for digits in range(DIGITS + 1):
        scaled = recorded.double() * 10**digits
        if float((scaled - scaled.round()).abs().max()) < 1e-3 and float(apart.max()) < 0.6 * 10**-digits:
            return _make_finding(side, f"has numbers of {digits} decimal places", WRITER, base)
    least = recorded.min()
    if (
        int((recorded == least).sum()) > 1
        and float(compute_residual(recorded, base.clamp(min=float(least))).max()) < CLIPPED_TOLERANCE
    ):
        return _make_finding(side, f"has no number below {float(least):.4g}", WRITER, base)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if (
            torch.equal(recorded.to(dtype).float(), recorded)
            and float((apart / base.abs()).max()) < torch.finfo(dtype).eps
        ):
            return _make_finding(side, f"has numbers of type {name}", WRITER, base)
    return None


def _make_finding(side: Side, text: str, key: str, base: Tensor, after: Tensor | None = None) -> Finding:
    before = Distance.measure(side.recorded, base)
    remaining = Distance(0.0, 0.0) if after is None else Distance.measure(side.recorded, after)
    return Finding("damaged_record", "record", f"the record of the {side.name} {text}", key, before, remaining)


def _find_impossible(side: Side, base: Tensor, _rounding: Distance) -> Finding | None:
    wrong = ~side.recorded.isfinite() | (side.recorded > 1e-3)
    if not wrong.any() or (side.recorded.isneginf() == wrong).all():  # -inf: a filter removes the token
        return None
    number = int(wrong.nonzero()[0])
    text = f"has {int(wrong.sum())} numbers that are no log-probabilities,"
    text += f" the first {float(side.recorded[number]):g} at {_describe_scored_token(side, number)}"
    return _make_finding(side, text, CHANGED, base)


def _describe_scored_token(side: Side, number: int) -> str:
    """Name the rollout and the token of a number of the record."""
    for rollout, length in zip(side.rollouts, side.lengths, strict=True):
        if number < length:
            return _describe_token(rollout, number)
        number -= length
    raise AssertionError("the token belongs to a rollout")


def _describe_token(rollout: Rollout, number: int) -> str:
    token = int(rollout.indices[number])
    position = int(rollout.tokens.chosen[number])
    return (
        f"token {token} of the response ({rollout.name}; position {position}, id {int(rollout.tokens.ids[position])})"
    )


def _find_other_units(side: Side, base: Tensor, rounding: Distance) -> Finding | None:
    # Logarithms to another base, with the other sign, or with a constant added.
    finite = side.recorded.isfinite() & base.isfinite()
    if int(finite.sum()) < 8:
        return None
    finite_values, plain = side.recorded[finite].double(), base[finite].double()
    # The straight line of least squares through (transformers, recorded).
    slope = float(
        ((finite_values - finite_values.mean()) @ (plain - plain.mean()))
        / (plain - plain.mean()).square().sum().clamp(min=1e-12)
    )
    added = float(finite_values.mean() - slope * plain.mean())
    fitted = slope * base + added
    before, after = Distance.measure(side.recorded, base), Distance.measure(side.recorded, fitted)
    if not after.is_within(rounding) or after.mean > before.mean / 3:
        return None
    text = f"has {slope:.4g} times the log-probabilities of transformers, plus {added:.2g}, at every token"
    return _make_finding(side, text, WRITER, base, fitted)


def _find_shifted(side: Side, base: Tensor, rounding: Distance) -> Finding | None:
    """Find that each rollout's numbers stand one token later or earlier."""
    pairs = list(zip(side.recorded.split(side.lengths), base.split(side.lengths), strict=True))
    for text, ours, theirs in (
        ("later", slice(1, None), slice(None, -1)),
        ("earlier", slice(None, -1), slice(1, None)),
    ):
        recorded_values = torch.cat([recorded[ours] for recorded, _ in pairs])
        moved = torch.cat([plain[theirs] for _, plain in pairs])
        if len(recorded_values) >= 4 and Distance.measure(recorded_values, moved).is_within(rounding):
            return _make_finding(side, f"has the log-probability of every token one token {text}", WRITER, base)
    return None


LEAST_MATCH = 4
"""Fewest tokens on which a rollout's numbers must agree with another's to be taken for them."""


def _find_exchanged(side: Side, base: Tensor, rounding: Distance) -> Finding | None:
    """Find rollouts whose numbers are those of other rollouts."""
    recorded, plain = side.recorded.split(side.lengths), base.split(side.lengths)
    sources: dict[int, int] = {}
    for number, numbers in enumerate(recorded):
        for source, predicted in enumerate(plain):
            size = min(len(numbers), len(predicted))
            # Short rollouts may agree by chance, and rollouts of the same text do agree.
            is_own = Distance.measure(numbers, plain[number]).is_within(rounding)
            if number == source or is_own or size < LEAST_MATCH:
                continue
            if Distance.measure(numbers[:size], predicted[:size]).is_within(rounding):
                sources[number] = source
    if len(sources) < max(2, len(recorded) - 1):
        return None
    names = [f"({rollout.name})" for rollout in side.rollouts]
    if len(sources) == 2 and all(sources.get(source) == number for number, source in sources.items()):
        first, second = sources
        text = f"has exchanged the log-probabilities of the rollouts {names[first]} and {names[second]}"
    else:
        texts = [f"{names[number]} has those of {names[source]}" for number, source in sources.items()]
        text = f"has the log-probabilities of other rollouts: {'; '.join(texts[:4])}" + "; and so on" * (len(texts) > 4)
    return _make_finding(side, text, CHANGED, base)


def find_edits(side: Side, base: Tensor, rounding: Distance) -> tuple[Finding, int] | None:
    """Find edited tokens and numbers in rollouts that agree otherwise.

    Arguments are those of `find_damage`.

    Returns:
        The finding, and how many numbers were edited.
    """
    texts, repaired, numbers = [], [], 0
    pieces = zip(side.rollouts, side.tokens, side.recorded.split(side.lengths), base.split(side.lengths), strict=True)
    for rollout, tokens, recorded, plain in pieces:
        apart = (compute_residual(recorded, plain) > rounding.worst).nonzero()[:, 0].tolist()
        if not apart:
            repaired.append(plain)
        elif len(apart) <= MOST_NAMED_TOKENS and len(apart) < len(recorded):
            numbers += len(apart)
            texts += [
                f"another number at {_describe_token(rollout, number)}: {float(recorded[number]):.6g}, "
                f"and transformers computes {float(plain[number]):.6g}"
                for number in apart
            ]
            repaired.append(recorded)
        else:
            original = _find_original_id(side, tokens, recorded, apart[0], rounding)
            if original is None:
                return None
            token_id, predicted = original
            texts.append(
                f"another id at {_describe_token(rollout, apart[0])}: the numbers behind it are those of id {token_id}"
            )
            repaired.append(predicted)
    if not texts or len(texts) > len(side.rollouts):
        return None
    listed_texts = "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
    return _make_finding(side, f"has {listed_texts}", CHANGED, base, torch.cat(repaired)), numbers


def _find_original_id(
    side: Side, sequence: Tokens, recorded: Tensor, first: int, rounding: Distance
) -> tuple[int, Tensor] | None:
    """Find the id with which a rollout agrees, and its log-probabilities then."""
    # The original id has the recorded probability; among ids that have it, the numbers of the later tokens decide.
    (probabilities,) = side.oracle.compute_probabilities([sequence], side.law)
    nearest = (probabilities[first].log() - recorded[first]).abs()
    for token_id in nearest.argsort()[:MOST_IDS].tolist():
        if float(nearest[token_id]) > rounding.worst:
            break
        ids = sequence.ids.clone()
        ids[sequence.chosen[first]] = token_id
        (predicted,) = side.oracle.compute_logprobs([replace(sequence, ids=ids)], [side.law])
        if Distance.measure(recorded, predicted).is_within(rounding):
            return token_id, predicted
    return None
