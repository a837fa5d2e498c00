"""Explanations of a log-probability gap: each changes the oracle, and predicts the log-probabilities that follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_grpo.proof.evidence import Rollout
from megatron_grpo.proof.oracle import Law, Oracle, RouterPart, Tokens

Cause = Literal["tokens", "weights", "precision", "layer", "sampling", "staleness", "routing", "unexplained"]
"""Kinds of reasons why training and generation differ."""
SideName = Literal["engine", "trainer"]
LARGEST = 40.0
"""Differences are cut to this size, as in the metrics of a step (docs/metrics.md)."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One explanation."""

    name: str
    """Name for programs, such as stale_tensor."""
    cause: Cause
    text: str
    """What would be wrong, as the rest of a sentence that begins with the side: "the engine ..."."""
    key: str
    """The configuration key to change, or another remedy."""


Prediction = tuple[Suspect, Tensor]
"""A suspect with the log-probabilities, [tokens], float32, that it predicts."""


def residual(recorded: Tensor, predicted: Tensor) -> Tensor:
    """Absolute differences of log-probabilities, [tokens], float32; what is not finite counts as `LARGEST`."""
    return (recorded - predicted).nan_to_num(LARGEST, LARGEST, -LARGEST).abs().clamp(max=LARGEST)


@dataclass(frozen=True, slots=True)
class Side:
    """A source of recorded log-probabilities, and the oracle for it."""

    name: SideName
    oracle: Oracle
    rollouts: Sequence[Rollout]
    tokens: Sequence[Tokens]
    """The sequences of the rollouts, or with other prompts."""
    law: Law
    """The sampling distribution of the configuration."""
    recorded: Tensor
    """[tokens], float32."""

    @property
    def lengths(self) -> list[int]:
        """Scored tokens of each rollout."""
        return [len(one.kept) for one in self.rollouts]

    def of_rollouts(self, numbers: Sequence[int]) -> Side:
        """The side with some of its rollouts."""
        pieces = self.recorded.split(self.lengths)
        return replace(
            self,
            rollouts=[self.rollouts[number] for number in numbers],
            tokens=[self.tokens[number] for number in numbers],
            recorded=torch.cat([pieces[number] for number in numbers]),
        )

    def predict(self, **changes: Any) -> Tensor:
        """The oracle's log-probabilities, [tokens], float32; `changes`: fields of the side."""
        side = replace(self, **changes) if changes else self
        return side.oracle.logprobs(side.tokens, [side.law])[0]


TEMPERATURES = tuple(float(one) for one in torch.logspace(-1, 1, 41, base=4.0))
"""Temperatures between 1/4 and 4 that are tried before the best one is refined."""


def sampling_suspects(side: Side) -> Iterator[Prediction]:
    """Other distributions over the same logits: no temperature, another one, no penalties, no filters."""
    law = side.law
    key = f"generation.temperature={law.temperature:g}"
    option = "generation.engine_args.logprobs_mode must be processed_logprobs (the default)"
    without: dict[str, tuple[Law, str, str]] = {
        "temperature": (replace(law, temperature=1.0), f"does not divide logits by {key}", f"{key}; {option}"),
        "sampling_filters": (replace(law, top_k=0, top_p=1.0, min_p=0.0), "ignores top_p, top_k and min_p", option),
        "sampling_penalties": (
            replace(law, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
            "ignores repetition_penalty, presence_penalty and frequency_penalty",
            option,
        ),
        "raw_logprobs": (Law(), "reports log-probabilities of the raw logits", option),
    }
    different = {name: one for name, one in without.items() if one[0] != law}
    predicted = side.oracle.logprobs(side.tokens, [law, *(one for one, _, _ in different.values())])[1:]
    for (name, (_, text, advice)), logprobs in zip(different.items(), predicted, strict=True):
        yield Suspect(name, "sampling", text, advice), logprobs
    best, logprobs = _fitted_temperature(side)
    yield Suspect("temperature", "sampling", f"has temperature {best:.4g}, and {key} is configured", key), logprobs


def _fitted_temperature(side: Side) -> tuple[float, Tensor]:
    """The temperature under which the recorded log-probabilities are predicted best, and these predictions."""
    tried: Sequence[float] = TEMPERATURES
    for _ in range(4):
        predicted = side.oracle.logprobs(side.tokens, [replace(side.law, temperature=one) for one in tried])
        errors = residual(side.recorded, predicted).mean(1)
        at = int(errors.argmin())
        low, high = tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)]
        best = tried[at], predicted[at]
        tried = [low + (high - low) * part / 20 for part in range(21)]
    return best


def prompt_suspects(side: Side, others: Mapping[str, tuple[str, Sequence[Tokens]]]) -> Iterator[Prediction]:
    """Other prompts before the same responses; `others`: by description, the key and the sequences."""
    for text, (key, tokens) in others.items():
        yield Suspect("wrong_template", "tokens", f"has seen another prompt: {text}", key), side.predict(tokens=tokens)


def version_suspects(side: Side, version: int, others: Iterable[tuple[int, Oracle]]) -> Iterator[Prediction]:
    """All weights of another version."""
    for number, oracle in others:
        behind = version - number
        steps = f"{abs(behind)} version{'s' * (abs(behind) > 1)} {'behind' if behind > 0 else 'ahead'}"
        text = f"has the weights of version {number}, {steps}, and says version {version}"
        yield Suspect("version_behind", "staleness", text, REFIT), side.predict(oracle=oracle)


REFIT = "refit.mode=broadcast (another transport, with vLLM's own loaders), and report the transport that failed"


def gate_up_suspects(side: Side) -> Iterator[Prediction]:
    """Gate and up matrices in each other's place: in all layers, and in each layer."""
    oracle = side.oracle
    swaps = [_swapped(layer) for layer in _by_layer(oracle.tensors(), len(oracle.layers))]
    if len(swaps) > 1:
        with oracle.replaced({name: value for swap in swaps for name, value in swap.items()}):
            yield _gate_up("every layer"), side.predict()
    for number, swap in enumerate(swaps):
        if swap:
            with oracle.replaced(swap):
                yield _gate_up(f"layer {number}"), side.predict()


def _gate_up(where: str) -> Suspect:
    return Suspect("gate_up_swapped", "weights", f"has gate_proj and up_proj in each other's place in {where}", REFIT)


def _by_layer(tensors: Mapping[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    return [{name: one for name, one in tensors.items() if f".layers.{number}." in name} for number in range(layers)]


def _swapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer that change when gate and up change places, with their values."""
    swapped = {}
    for name, value in tensors.items():
        if name.endswith("gate_up_proj"):  # stacked experts: [experts, gate rows and up rows, hidden]
            swapped[name] = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
        for one, other in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
            if name.endswith(f"{one}.weight"):
                swapped[name] = tensors[name.replace(one, other)]
    return swapped


ROPE = "rope_parameters of config.json in policy.model.path, and generation.engine_args.hf_overrides"


def rope_suspects(side: Side) -> Iterator[Prediction]:
    """Other rotary embeddings: without the model's scaling, with another factor or base, or with a scaling it lacks."""
    whole: dict[str, Any] = side.oracle.model.config.rope_parameters
    # Some families have parameters of their own for each kind of layer.
    of_kinds = {"": whole} if "rope_type" in whole else {f" of {kind}": one for kind, one in whole.items()}
    for kind, own in of_kinds.items():
        for text, rope in _other_ropes(own):
            with side.oracle.other_rope({**whole, kind.removeprefix(" of "): rope} if kind else rope):
                yield Suspect("rope_scaling", "layer", f"has rotary embeddings{kind} {text}", ROPE), side.predict()


def _other_ropes(own: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(description, transformers' rope_parameters) of other rotary embeddings than a model's own."""
    plain = {"rope_type": "default", "rope_theta": own["rope_theta"]}
    if own["rope_type"] != "default":
        yield f"without its scaling (rope_type={own['rope_type']}, factor={own.get('factor')})", plain
    scaled = dict(own) if own.get("factor") else {**plain, "rope_type": "linear", "factor": 1.0}
    for times in (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0):
        factor = scaled["factor"] * times
        yield f"scaled by factor {factor:g} (rope_type={scaled['rope_type']})", {**scaled, "factor": factor}
    for theta in (1e4, 5e5, 1e6):
        if theta != own["rope_theta"]:
            yield f"of rope_theta={theta:g} instead of {own['rope_theta']:g}", {**own, "rope_theta": theta}


def router_suspects(side: Side) -> Iterator[Prediction]:
    """Routers in bfloat16, with the number of tokens that go to other experts then."""
    if not side.oracle.routers:
        return
    key = "generation.engine.dtype=float32 and policy.precision=float32; or policy.moe.replay_routing=true"
    before = side.oracle.hidden_states(side.tokens)
    product: tuple[RouterPart, ...] = ("inputs", "weights", "logits")
    kinds: dict[str, tuple[RouterPart, ...]] = {
        "computes the routers of experts in bfloat16": product,
        "computes the routers of experts in bfloat16, and rounds the weights of chosen experts": (*product, "scores"),
        "gives the routers of experts inputs and weights in bfloat16": ("inputs", "weights"),
        "has the weights of routers in bfloat16": ("weights",),
    }
    for text, parts in kinds.items():
        with side.oracle.rounded_routers(set(parts)):
            after, predicted = side.oracle.hidden_states(side.tokens), side.predict()
        routers = [point for point in before if point.endswith("router")]
        other = {point: int(((before[point] > 0) != (after[point] > 0)).any(1).sum()) for point in routers}
        most = max(routers, key=other.__getitem__)
        counted = (
            f"{other[most]} of {len(before[most])} tokens go to other experts in {most.removesuffix('.mlp.router')}"
        )
        yield Suspect("router_precision", "routing", f"{text}: {counted}", key), predicted


PRECISION = "generation.engine.dtype and policy.precision (one type for both); engine_args.quantization, kv_cache_dtype"


def rounded_weight_suspects(side: Side) -> Iterator[Prediction]:
    """Weights rounded to bfloat16, and computed with in float32."""
    rounded = {name: value.bfloat16().float() for name, value in side.oracle.tensors().items()}
    with side.oracle.replaced(rounded):
        yield Suspect("weight_precision", "precision", "has weights rounded to bfloat16", PRECISION), side.predict()


def tensor_suspects(side: Side, base: Tensor, other: Oracle, number: int) -> Iterator[Prediction]:
    """Single tensors of another version, and sets of tensors whose effects add up to the gap.

    Weights change little in a step, so the effect of a set of tensors is nearly the sum of their effects, and each of
    these is computed. Transformers stacks the experts of a layer, so single experts are tried in the stacked tensors
    whose effect resembles the gap most.

    Args:
        side: the side that is explained.
        base: [tokens], float32: predictions without a change.
        other: the oracle of the other version.
        number: that version.
    """
    ours, theirs, gap = side.oracle.tensors(), other.tensors(), side.recorded - base
    changed = {name: {name: theirs[name]} for name in ours if not torch.equal(ours[name], theirs[name])}
    effects = _effects(side, base, changed)
    stacked = [name for name in changed if ours[name].dim() == 3]
    stacked.sort(key=lambda name: -float(torch.cosine_similarity(effects[name], gap, dim=0)))
    parts = {part: one for name in stacked[:MOST_STACKED] for part, one in _expert_parts(name, ours, theirs)}
    for units, found in ((changed, effects), (parts, _effects(side, base, parts))):
        chosen = pursue(gap, found)
        if chosen:
            values = _joined(ours, [units[name] for name in chosen])
            with side.oracle.replaced(values):
                yield _stale(chosen, number), side.predict()


MOST_STACKED = 3
"""Stacked tensors in which single experts are tried."""
MOST_STALE = 16
"""Most tensors that are named together; if more are stale, the whole version is under suspicion."""


def _stale(names: Sequence[str], number: int) -> Suspect:
    kept = f"kept {', '.join(names)} of version {number}"
    return Suspect("stale_tensor", "weights", kept, REFIT)


def _effects(side: Side, base: Tensor, units: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Change of the log-probabilities, [tokens], float32, by each unit: other values of some tensors."""
    found = {}
    for unit, values in units.items():
        with side.oracle.replaced(values):
            found[unit] = side.predict() - base
    return found


def pursue(gap: Tensor, effects: Mapping[str, Tensor]) -> list[str]:
    """The units whose effects add up to a gap: the one that comes closest, then each that brings the sum closer.

    Args:
        gap: [tokens], float32.
        effects: effect of each unit, [tokens], float32.

    Returns:
        Names of the units, at most `MOST_STALE`; empty if each leaves the gap wider than it was.
    """
    chosen: list[str] = []
    left = gap
    while len(chosen) < min(MOST_STALE, len(effects)):
        best = min(effects.keys() - set(chosen), key=lambda name: float((left - effects[name]).abs().mean()))
        closer = left - effects[best]
        if float(closer.abs().mean()) >= float(left.abs().mean()):
            break
        chosen.append(best)
        left = closer
    return chosen


def _expert_parts(
    name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The matrices of single experts in a stacked tensor, [experts, rows, columns], by their names in the files."""
    prefix, _, last = name.rpartition(".")
    pieces = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    rows = ours[name].shape[1] // len(pieces)
    for expert in range(len(ours[name])):
        for place, piece in enumerate(pieces):
            region = slice(place * rows, (place + 1) * rows)
            if not torch.equal(ours[name][expert, region], theirs[name][expert, region]):
                value = ours[name].clone()
                value[expert, region] = theirs[name][expert, region]
                yield f"{prefix}.{expert}.{piece}.weight", {name: value}


def _joined(ours: Mapping[str, Tensor], units: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Values with the changes of several units, of which several may change parts of one tensor."""
    joined: dict[str, Tensor] = {}
    for unit in units:
        for name, value in unit.items():
            before = joined.get(name, ours[name])
            joined[name] = torch.where(value != ours[name], value, before)
    return joined
