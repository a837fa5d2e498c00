"""Suspects in settings of the model: those that the engine was started with, and those that programs get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit
from megatron_grpo.verification.oracle import Oracle, RouterPart

OVERRIDES = "generation.engine_args.hf_overrides"
MODEL = f"config.json in policy.model.path, and {OVERRIDES}"
ROPE = f"rope_parameters of {MODEL}"
EPSILONS = tuple(10.0**power for power in range(-12, 1))
SCALES = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0)
WINDOWS = (*range(1, 65), 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
CAPS = (10.0, 20.0, 30.0, 50.0)


def iterate_engine_settings(settings: Mapping[str, Any], side: Side) -> Iterator[Candidate]:
    """Yield the engine's differing model settings, by name, alone and together."""
    alone = [{name: value} for name, value in settings.items()]
    for changes in [*alone, *([dict(settings)] if len(settings) > 1 else [])]:
        config = side.oracle.model.config
        parts = [f"{name}={value}, and the model says {getattr(config, name, None)}" for name, value in changes.items()]
        key = ", ".join(f"{OVERRIDES}.{name}" for name in changes)
        suspect = Suspect("engine_settings", "layer", f"has {'; '.join(parts)}", key, assumes=len(changes))
        yield from _with_settings(side, suspect, changes)


def _with_settings(side: Side, suspect: Suspect, changes: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield the model with other settings, if transformers can build it."""

    # Built once, not again for each prediction.
    @cache
    def load_changed() -> Oracle:
        return Oracle(side.oracle.folder, side.oracle.model.dtype, changes)

    try:
        load_changed()
    except RunError:
        return
    yield suspect, lambda part: part.predict(oracle=load_changed())


def iterate_settings(side: Side) -> Iterator[Candidate]:
    """Yield settings that programs get wrong: epsilon, scale, window, caps, experts."""
    config = side.oracle.model.config
    yield from _fit_setting(
        side, "rms_norm_eps", "computes norms with an epsilon of", EPSILONS, side.oracle.change_epsilon
    )
    text = "multiplies the products of queries and keys by"
    yield from _fit_setting(side, "attention_scale", text, SCALES, side.oracle.change_scale)
    for name, values in _list_values(config).items():
        before = getattr(config, name)
        for value in values:
            if value != before:
                text = f"has {name}={value}, and the model says {before}"
                suspect = Suspect("model_setting", "layer", text, f"{name} of {MODEL}", assumes=2)
                yield from _with_settings(side, suspect, {name: value})


def _fit_setting(
    side: Side,
    name: str,
    text: str,
    values: tuple[float, ...],
    changed: Callable[[float], AbstractContextManager[None]],
) -> Iterator[Candidate]:
    def predict(number: float, part: Side) -> Tensor:
        with changed(number):
            return part.predict()

    best = fit(side, values, lambda numbers: (predict(number, side) for number in numbers))
    suspect = Suspect("model_setting", "layer", f"{text} {best:.4g}", f"{name} of {MODEL}", assumes=2)
    yield suspect, partial(predict, best)


def _list_values(config: Any) -> dict[str, tuple[Any, ...]]:
    """List other values of the settings that the model has, by name."""
    # A window of 2^20 tokens stands for none.
    window = getattr(config, "sliding_window", None)
    count, chosen = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
    count = count or getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None)
    values: dict[str, tuple[Any, ...]] = {
        "sliding_window": ()
        if window is None
        else (1 << 20, *WINDOWS, window - 1, window + 1, window // 2, 2 * window),
        "num_experts_per_tok": tuple(range(1, min(count, 2 * chosen) + 1)) if count and chosen else (),
        "layer_types": _list_kinds(getattr(config, "layer_types", None)),
        "norm_topk_prob": (True, False),
        "routed_scaling_factor": (1.0,),
        "hidden_act": ACTIVATIONS,
        "hidden_activation": ACTIVATIONS,
        "attn_logit_softcapping": (None, *CAPS),
        "final_logit_softcapping": (None, *CAPS),
    }
    return {name: alternatives for name, alternatives in values.items() if hasattr(config, name)}


def _list_kinds(kinds: Sequence[str] | None) -> tuple[list[str], ...]:
    """List other orders of the layers' kinds, and one for all."""
    if not kinds or len(set(kinds)) < 2:
        return ()
    moved = [[*kinds[by:], *kinds[:by]] for by in range(1, min(len(kinds), 8))]
    return ([kinds[0]] * len(kinds), [kinds[-1]] * len(kinds), list(kinds[::-1]), *moved)


def iterate_ropes(side: Side) -> Iterator[Candidate]:
    """Yield rotary embeddings with other scalings, factors and bases."""
    rope_parameters: dict[str, Any] | None = getattr(side.oracle.model.config, "rope_parameters", None)
    if not rope_parameters:  # attention without positions
        return
    # Some families have parameters of their own for each kind of layer.
    of_kinds = (
        {"": rope_parameters}
        if "rope_type" in rope_parameters
        else {f" of {kind}": rope for kind, rope in rope_parameters.items()}
    )
    if len(of_kinds) == 2:
        first, second = rope_parameters
        exchanged = {first: rope_parameters[second], second: rope_parameters[first]}
        text = f"has the rotary embeddings of {first} and {second} in each other's place"
        yield Suspect("rope_scaling", "layer", text, ROPE), partial(_with_rope, exchanged)
    for kind, rope in of_kinds.items():
        for text, changed_rope in _list_ropes(rope):
            suspect = Suspect("rope_scaling", "layer", f"has rotary embeddings{kind} {text}", ROPE)
            yield suspect, partial(_with_rope, _replace_rope(rope_parameters, kind, changed_rope))

        def set_base(base: float, kind: str = kind, rope: Mapping[str, Any] = rope) -> Mapping[str, Any]:
            return _replace_rope(rope_parameters, kind, {**rope, "rope_theta": base})

        fitted = fit(side, list_bases(rope), partial(_with_bases, set_base, side))
        text = f"has rotary embeddings{kind} of rope_theta={fitted:.4g} instead of {rope['rope_theta']:g}"
        suspect = Suspect("rope_scaling", "layer", text, ROPE, assumes=2)
        yield suspect, partial(_with_rope, set_base(fitted))


def _with_rope(rope: Mapping[str, Any], side: Side) -> Tensor:
    with side.oracle.change_rope(rope):
        return side.predict()


def _with_bases(set_base: Callable[[float], Mapping[str, Any]], side: Side, bases: Sequence[float]) -> Iterator[Tensor]:
    return (_with_rope(set_base(base), side) for base in bases)


def _replace_rope(rope_parameters: Mapping[str, Any], kind: str, rope: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**rope_parameters, kind.removeprefix(" of "): rope} if kind else rope


def list_bases(rope: Mapping[str, Any]) -> list[float]:
    """List the bases of rotary embeddings that are tried first, ascending."""
    base = float(rope["rope_theta"])
    return sorted({base * factor for factor in (0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0)} | {1e4, 1e5, 5e5, 1e6, 1e7})


def _list_ropes(rope: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield description and rope_parameters of other rotary embeddings."""
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        plain["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        yield f"without its scaling (rope_type={rope['rope_type']}, factor={rope.get('factor')})", plain
    scaled = dict(rope) if rope.get("factor") else {**plain, "rope_type": "linear", "factor": 1.0}
    for times in (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0):
        factor = scaled["factor"] * times
        yield f"scaled by factor {factor:g} (rope_type={scaled['rope_type']})", {**scaled, "factor": factor}
    for theta in (1e4, 5e5, 1e6):
        if theta != rope["rope_theta"]:
            yield f"of rope_theta={theta:g} instead of {rope['rope_theta']:g}", {**rope, "rope_theta": theta}


def iterate_routers(side: Side) -> Iterator[Candidate]:
    """Yield routers in bfloat16; the texts count tokens that change experts."""
    if not side.oracle.routers:
        return
    key = "generation.engine.dtype=float32 and policy.precision=float32; or policy.moe.replay_routing=true"
    before = side.oracle.compute_hidden_states(side.tokens)
    product: tuple[RouterPart, ...] = ("inputs", "weights", "logits")
    kinds: dict[str, tuple[RouterPart, ...]] = {
        "computes the routers of experts in bfloat16": product,
        "computes the routers of experts in bfloat16, and rounds the weights of chosen experts": (*product, "scores"),
        "gives the routers of experts inputs and weights in bfloat16": ("inputs", "weights"),
        "has the weights of routers in bfloat16": ("weights",),
    }
    for text, parts in kinds.items():
        with side.oracle.rounded_routers(set(parts)):
            after = side.oracle.compute_hidden_states(side.tokens)
        routers = [point for point in before if point.endswith("router")]
        moved_tokens = {point: int(((before[point] > 0) != (after[point] > 0)).any(1).sum()) for point in routers}
        router = max(routers, key=moved_tokens.__getitem__)
        layer = router.removesuffix(".mlp.router")
        counted = f"{moved_tokens[router]} of {len(before[router])} tokens go to other experts in {layer}"
        suspect = Suspect("router_precision", "routing", f"{text}: {counted}", key)
        yield suspect, partial(_round_routers, parts)


def _round_routers(parts: tuple[RouterPart, ...], side: Side) -> Tensor:
    with side.oracle.rounded_routers(set(parts)):
        return side.predict()


PRECISION = "generation.engine.dtype and policy.precision (one type for both); engine_args.quantization, kv_cache_dtype"


def iterate_rounded_weights(side: Side) -> Iterator[Candidate]:
    """Yield weights rounded to 16 bits, with which float32 arithmetic computes."""
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        suspect = Suspect("weight_precision", "precision", f"has weights rounded to {name}", PRECISION)
        yield suspect, partial(_round_weights, dtype)


def _round_weights(dtype: torch.dtype, side: Side) -> Tensor:
    rounded = {name: value.to(dtype).float() for name, value in side.oracle.list_tensors().items()}
    with side.oracle.replaced(rounded):
        return side.predict()
