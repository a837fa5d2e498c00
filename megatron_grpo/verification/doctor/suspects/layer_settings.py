"""Suspects in a setting of one layer or norm: epsilon, scale of attention, base of rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.suspects.effects import Effects, clip_gap
from megatron_grpo.verification.doctor.suspects.settings import EPSILONS, MODEL, ROPE, SCALES, list_bases
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit
from megatron_grpo.verification.oracle import Oracle

RANKED = 3
"""Settings whose values are fitted: those whose effects fit best."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A number of one layer or norm."""

    text: str
    """What is wrong, up to the number, as the rest of a sentence that begins with the side."""
    key: str
    values: Sequence[float]
    """First values that are tried, ascending."""
    probe: float
    """Value whose effect ranks the setting."""
    change: Callable[[float], AbstractContextManager[None]]
    assumes: int = 2


def iterate_layer_settings(side: Side) -> Iterator[Candidate]:
    """Yield the settings of single layers that fit best, each with its best value."""
    settings = list_layer_settings(side.oracle)
    if not settings:
        return
    plain = side.predict()
    columns = [_with_setting(setting, setting.probe, side) - plain for setting in settings]
    effects = Effects(clip_gap(side.recorded - plain), torch.stack(columns, dim=1).nan_to_num(0.0))
    for number in effects.rank_multiples(RANKED):
        setting = settings[number]
        best = fit(side, setting.values, partial(_with_values, setting, side))
        suspect = Suspect("model_setting", "layer", f"{setting.text} {best:.4g}", setting.key, setting.assumes)
        yield suspect, partial(_with_setting, setting, best)


def _with_setting(setting: Setting, value: float, side: Side) -> Tensor:
    with setting.change(value):
        return side.predict()


def _with_values(setting: Setting, side: Side, values: Sequence[float]) -> Iterator[Tensor]:
    return (_with_setting(setting, value, side) for value in values)


def list_layer_settings(oracle: Oracle) -> list[Setting]:
    """List the settings of norms, layers and attentions."""
    settings = []
    layers = [f"model.layers.{number}." for number in range(len(oracle.layers))]
    for name in [*layers, *oracle.norms]:
        text = f"computes the norms of layer {name.split('.')[2]}" if name in layers else f"computes {name}"
        change = partial(oracle.change_epsilon, within=name)
        settings.append(Setting(f"{text} with an epsilon of", f"rms_norm_eps of {MODEL}", EPSILONS, 1e-2, change))
    rope = getattr(oracle.model.config, "rope_parameters", None) or {}
    for layer in oracle.attentions:
        # Weights of queries or keys times a number have the same effect, and assume less of the program.
        text = f"multiplies the products of queries and keys in layer {layer} by"
        change = partial(oracle.change_scale, layer=layer)
        settings.append(Setting(text, f"attention_scale of {MODEL}", SCALES, 1.1, change, assumes=3))
        if "rope_type" in rope:  # one kind of rotary embeddings for all layers

            def set_base(base: float, layer: int = layer) -> AbstractContextManager[None]:
                return oracle.change_rope_in(layer, {**rope, "rope_theta": base})

            text = f"has rotary embeddings in layer {layer} that are not of rope_theta={rope['rope_theta']:g} but of"
            settings.append(Setting(text, ROPE, list_bases(rope), 2 * float(rope["rope_theta"]), set_base))
    return settings
