"""Suspects in parts of the weights: kept from another version, missing, or multiplied by a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.law import compute_residual
from megatron_grpo.verification.doctor.suspects.effects import compute_effects, make_part_probe
from megatron_grpo.verification.doctor.suspects.parts import (
    EMBEDDING,
    HEAD,
    Part,
    list_experts,
    list_heads,
    list_kinds,
    list_kinds_within,
    list_layers,
    list_shards,
    list_single_tensors,
    list_stages,
)
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect
from megatron_grpo.verification.doctor.suspects.versions import REFIT
from megatron_grpo.verification.oracle import Oracle

Values = Mapping[str, Tensor]
FIRST_FACTOR = 1.05
"""First factor that is tried; the effect of it gives the next one."""
ROUNDS = 5
"""Most corrections of a factor."""
RANKED = 24
"""Small parts that are tried exactly: those whose effects fit best."""
MOST_STALE = 16
"""Most parts of a set; if more are stale, the version as a whole is suspect."""


def list_parts(oracle: Oracle, pipelines: Sequence[int], ranks: Sequence[int]) -> list[Part]:
    """List the parts that are tried, small ones first.

    Args:
        oracle: the model.
        pipelines: numbers of pipeline stages of the run's layouts.
        ranks: numbers of tensor-parallel ranks of these layouts.
    """
    tensors, layers = oracle.list_tensors(), len(oracle.layers)
    return [
        *list_single_tensors(tensors),
        *list_experts(tensors),
        *list_layers(tensors, layers),
        *list_stages(tensors, layers, [2, *pipelines]),
        *list_kinds(tensors),
        *list_shards(tensors, [2, *ranks]),
    ]


def list_fine_parts(oracle: Oracle, pipelines: Sequence[int]) -> list[Part]:
    """List heads, and kinds of tensors within a layer or stage.

    Arguments are those of `list_parts`.
    """
    tensors, layers = oracle.list_tensors(), len(oracle.layers)
    bounds = [*list_layers(tensors, layers), *list_stages(tensors, layers, [2, *pipelines])]
    return [*list_heads(tensors, oracle.model.config), *list_kinds_within(tensors, bounds)]


def iterate_fine_parts(parts: Sequence[Part], side: Side) -> Iterator[Candidate]:
    """Yield the parts that fit best, wrong or scaled."""
    ours = side.oracle.list_tensors()
    (effects,) = compute_effects(side, [make_part_probe(parts, ours)])
    chosen = [parts[number] for number in effects.rank_multiples(RANKED)]
    yield from iterate_missing_parts(chosen, side)
    yield from _iterate_multiples(chosen, ours, side)


def iterate_fine_stale_parts(
    parts: Sequence[Part], load: Callable[[], Oracle], text: str, side: Side
) -> Iterator[Candidate]:
    """Yield the parts that fit best with another version's numbers.

    Arguments are those of `iterate_stale_parts`.
    """
    ours, theirs = side.oracle.list_tensors(), load().list_tensors()
    changes = {name: theirs[name] - ours[name] for name in ours if ours[name].is_floating_point()}
    (effects,) = compute_effects(side, [make_part_probe(parts, changes)])
    chosen = [parts[number] for number in effects.rank_changes(RANKED)]
    yield from _iterate_mixed_parts(chosen, ours, theirs, text)


def _iterate_mixed_parts(parts: Sequence[Part], ours: Values, theirs: Values, text: str) -> Iterator[Candidate]:
    for part in parts:
        values = part.mix(ours, theirs)
        if values:
            words = f"kept {part.name} of {text}"
            suspect = Suspect("stale_tensor", "weights", words, REFIT, tensors=len(values))
            yield suspect, partial(_with_values, values)


def iterate_adapter_parts(parts: Sequence[Part], load: Callable[[], Oracle], side: Side) -> Iterator[Candidate]:
    """Yield adapters of parts that fit best, times a number.

    `load`: loads the model without adapters.
    """
    ours, bare = side.oracle.list_tensors(), load().list_tensors()
    changes = {name: ours[name] - bare[name] for name in ours if not torch.equal(ours[name], bare[name])}
    (effects,) = compute_effects(side, [make_part_probe(parts, changes)])
    gap = side.recorded - side.predict()
    for number in effects.rank_multiples(RANKED):
        part = parts[number]

        def predict(factor: float, tokens: Side, part: Part = part) -> Tensor:
            return _with_values(_scale_adapters(part, ours, bare, factor), tokens)

        factor = _fit_factor(partial(predict, tokens=side), side, side.predict(), gap)
        if factor is not None:
            text = f"has merged the adapters of {part.name} times {factor:.4g}"
            key = "policy.lora.alpha and policy.lora.rank; " + REFIT
            count = len(part.regions.keys() & changes)
            yield Suspect("adapters_scaled", "weights", text, key, assumes=2, tensors=count), partial(predict, factor)


def _scale_adapters(part: Part, ours: Values, bare: Values, factor: float) -> dict[str, Tensor]:
    values = {}
    for name, region in part.regions.items():
        value = ours[name].clone()
        value[region] = bare[name][region] + factor * (ours[name][region] - bare[name][region])
        values[name] = value
    return values


def iterate_stale_parts(
    parts: Sequence[Part], load: Callable[[], Oracle], text: str, side: Side
) -> Iterator[Candidate]:
    """Yield each part with another version's numbers.

    Args:
        parts: parts of the model.
        load: loads the other version.
        text: that version, for messages.
        side: the record.
    """
    ours, theirs = side.oracle.list_tensors(), load().list_tensors()
    yield from _iterate_mixed_parts(parts, ours, theirs, text)
    # An engine may copy tied weights for the head, so a refit may reach one of the two alone.
    if side.oracle.is_tied and not torch.equal(ours[EMBEDDING], theirs[EMBEDDING]):
        head = Suspect("stale_tensor", "weights", f"kept the head ({HEAD}, tied to {EMBEDDING}) of {text}", REFIT)
        yield head, partial(_with_head, theirs[EMBEDDING])
        embedding = Suspect(
            "stale_tensor", "weights", f"kept {EMBEDDING} of {text}, and not the head tied to it", REFIT
        )
        yield embedding, partial(_with_embedding, {EMBEDDING: theirs[EMBEDDING]}, ours[EMBEDDING])


def _with_values(values: Values, side: Side) -> Tensor:
    with side.oracle.replaced(values):
        return side.predict()


def _with_head(head: Tensor, side: Side) -> Tensor:
    with side.oracle.other_head(head):
        return side.predict()


def _with_embedding(values: Values, head: Tensor, side: Side) -> Tensor:
    with side.oracle.replaced(values), side.oracle.other_head(head):
        return side.predict()


WRONG = ((0.0, 0.0, "zeros for"), (-1.0, 0.0, "the other sign of"), (2.0, 0.0, "twice"), (0.5, 0.0, "half of"))
WRONG_NORMS = ((0.0, 1.0, "ones for"), (1.0, 1.0, "one more than"), (1.0, -1.0, "one less than"))
"""(factor, added number, words) of wrong weights, and of wrong weights of norms."""


def iterate_missing_parts(parts: Sequence[Part], side: Side) -> Iterator[Candidate]:
    """Yield parts that were never loaded, scaled, or off by one."""
    # Norms off by one are what a program does that takes Gemma's norms, whose weights are added to 1, for others.
    ours = side.oracle.list_tensors()
    for part in parts:
        is_norm = all("norm" in name for name in part.regions)
        for factor, added, words in (*WRONG, *(WRONG_NORMS if is_norm else ())):
            suspect = Suspect("wrong_tensor", "weights", f"has {words} {part.name}", REFIT, tensors=len(part.regions))
            yield suspect, partial(_with_values, part.scale(ours, factor, added))


def iterate_scaled_parts(parts: Sequence[Part], side: Side) -> Iterator[Candidate]:
    """Yield each part times the number that explains most of the record."""
    ours, plain = side.oracle.list_tensors(), side.predict()
    gap = side.recorded - plain
    yield from _iterate_multiples(parts, ours, side)
    if side.oracle.is_tied:
        for text, scaled in (
            ("the head, tied to the embedding,", _with_head),
            ("the embedding without the head", None),
        ):
            yield from _scale_end(text, scaled, side, plain, gap)


def _iterate_multiples(parts: Sequence[Part], ours: Values, side: Side) -> Iterator[Candidate]:
    plain = side.predict()
    gap = side.recorded - plain
    for part in parts:
        predict_scaled = partial(_scale_part, part, ours, side)
        factor = _fit_factor(predict_scaled, side, plain, gap)
        if factor is not None:
            text = f"has {part.name} times {factor:.4g}"
            suspect = Suspect("scaled_tensor", "weights", text, REFIT, assumes=2, tensors=len(part.regions))
            yield suspect, partial(_with_values, part.scale(ours, factor))


def _scale_part(part: Part, ours: Values, side: Side, factor: float) -> Tensor:
    return _with_values(part.scale(ours, factor), side)


def _fit_factor(predict: Callable[[float], Tensor], side: Side, plain: Tensor, gap: Tensor) -> float | None:
    """Fit the best factor; None: corrections leave most of the gap."""
    # A secant method: the effect of a small step of the factor, projected on what is left of the gap, gives the next.
    factor, step = 1.0, FIRST_FACTOR - 1.0
    now, remainder = plain, gap
    for number in range(ROUNDS):
        effect = predict(factor + step) - now
        square = float(effect.square().sum())
        if not square or not remainder.isfinite().all():
            return None
        move = float(remainder @ effect) / square * step
        move = max(-2.0, min(2.0, move))
        factor += move
        now = predict(factor)
        remainder = side.recorded - now
        if number == 1 and float(compute_residual(side.recorded, now).mean()) > 0.5 * float(gap.abs().mean()):
            return None
        step = max(1e-4, min(abs(move), FIRST_FACTOR - 1.0))
    return factor


def _scale_end(
    text: str, with_head: Callable[[Tensor, Side], Tensor] | None, side: Side, plain: Tensor, gap: Tensor
) -> Iterator[Candidate]:
    """Yield one of a tied pair, head or embedding, times a number."""
    weight = side.oracle.list_tensors()[EMBEDDING]

    def predict(factor: float, part: Side) -> Tensor:
        if with_head is not None:
            return with_head(weight * factor, part)
        return _with_embedding({EMBEDDING: weight * factor}, weight, part)

    factor = _fit_factor(lambda number: predict(number, side), side, plain, gap)
    if factor is not None:
        suspect = Suspect("scaled_tensor", "weights", f"has {text} times {factor:.4g}", REFIT, assumes=2)
        yield suspect, partial(predict, factor)


def iterate_stale_sets(parts: Sequence[Part], load: Callable[[], Oracle], text: str, side: Side) -> Iterator[Candidate]:
    """Yield stale parts whose effects add up to the gap."""
    # Weights change little in a step, so the effect of a set of parts is nearly the sum of their effects.
    ours, theirs = side.oracle.list_tensors(), load().list_tensors()
    plain = side.predict()
    changes = {part.name: values for part in parts if (values := part.mix(ours, theirs))}
    effects = {name: _with_values(values, side) - plain for name, values in changes.items()}
    chosen = pursue(side.recorded - plain, effects)
    if len(chosen) > 1:
        values = _join_changes(ours, [changes[name] for name in chosen])
        suspect = Suspect("stale_tensor", "weights", f"kept {', '.join(chosen)} of {text}", REFIT, assumes=len(chosen))
        yield suspect, partial(_with_values, values)


def pursue(gap: Tensor, effects: Mapping[str, Tensor]) -> list[str]:
    """Choose effects that add up to a gap, by a greedy pursuit.

    Args:
        gap: [tokens], float32.
        effects: [tokens], float32, by name.

    Returns:
        At most `MOST_STALE` names; empty if every effect widens the gap.
    """
    chosen: list[str] = []
    remainder = gap
    while len(chosen) < min(MOST_STALE, len(effects)):
        best = min(effects.keys() - set(chosen), key=lambda name: float((remainder - effects[name]).abs().mean()))
        closer = remainder - effects[best]
        if float(closer.abs().mean()) >= float(remainder.abs().mean()):
            break
        chosen.append(best)
        remainder = closer
    return chosen


def _join_changes(ours: Mapping[str, Tensor], changes: Sequence[Values]) -> dict[str, Tensor]:
    # Several changes may be to regions of one tensor, so each adds the numbers in which it differs.
    joined: dict[str, Tensor] = {}
    for change in changes:
        for name, value in change.items():
            before = joined.get(name, ours[name])
            joined[name] = torch.where(value != ours[name], value, before)
    return joined
