"""The weight map of released models has as many numbers as their publishers count."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from megatron_grpo.models.families import build_weight_map, measure_tensors, parse_model_shape, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import iter_entries
from tests.support.hf_configs import PUBLISHED, config_folder
from tests.support.released_configs import BILLIONS, GEMMA4_26B, GEMMA4_31B, LLAMA4_MAVERICK, LLAMA4_SCOUT


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert _parameters(read_model_shape(config_folder(name))) == PUBLISHED[name]["parameters"]


def _parameters(shape: ModelShape) -> int:
    """Numbers in all tensors of the weight map, copies of tied tensors included."""
    entries = iter_entries(build_weight_map(shape), shape, range(shape.layers))
    experts = shape.experts.count if shape.experts is not None else 1
    return sum(
        prod(tensor.measure(shape.sizes)) * (experts if "{expert}" in tensor.name else 1)
        for entry, _, _ in entries
        for tensor in entry.hf
    )


@pytest.mark.parametrize(
    ("raw", "billions", "accuracy"),
    [
        *((raw, billions, 5e-4 * billions) for raw, billions in BILLIONS.values()),
        *((raw, billions, 0.1) for raw, billions in ((GEMMA4_31B, 30.7), (GEMMA4_26B, 25.2))),
        *((raw, billions, 0.1) for raw, billions in ((LLAMA4_SCOUT, 107.8), (LLAMA4_MAVERICK, 400.7))),
    ],
)
def test_tensors_have_as_many_numbers_as_published(raw: dict[str, Any], billions: float, accuracy: float) -> None:
    numbers = sum(prod(size) for size in measure_tensors(parse_model_shape(raw)).values())
    assert numbers / 1e9 == pytest.approx(billions, abs=accuracy)
