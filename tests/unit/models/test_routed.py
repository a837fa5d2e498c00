"""The form of routed experts: its bits against a string of zeros and ones, and the engine's layers that are kept."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
from tests.support.hf_configs import QWEN3_MOE

SIZES = [
    (2, 2),
    (2, 3),
    (8, 128),
    (8, 256),
    (4, 32),
    (22, 512),
    (6, 64),
    (3, 1000),
    (1, 16),
    (1, 128),
    (1, 1),
    (8, 255),
]
"""Experts of a token, and in a layer."""


def draw(tokens: int, layers: int, top_k: int, experts: int) -> NDArray[np.int64]:
    """[tokens, layers, top_k]: distinct experts, or -1 for all of a layer's."""
    numbers = random.Random(experts)
    rows = [
        [numbers.sample(range(experts), top_k) if numbers.random() < 0.8 else [-1] * top_k for _ in range(layers)]
        for _ in range(tokens)
    ]
    return np.array(rows)


def as_bits(chosen: list[int], experts: int) -> bytes:
    """A layer's bytes, written as a string of digits."""
    single = len(chosen) == 1
    width = max(1, math.ceil(math.log2(experts + single)))
    if chosen[0] < 0:
        digits = "0" * (width * len(chosen))
    else:
        digits = "".join(format(expert + single, f"0{width}b") for expert in reversed(chosen))
    count = math.ceil(len(digits) / 8)
    return int(digits, 2).to_bytes(count, "little")


@pytest.mark.parametrize(("top_k", "experts"), SIZES)
def test_bytes_are_those_of_a_string_of_bits(top_k: int, experts: int) -> None:
    form = RoutedForm(layers=(0, 1, 4), top_k=top_k, experts=experts)
    chosen = draw(20, 3, top_k, experts)
    packed = form.pack(chosen)
    expected = [b"".join(as_bits(layer, experts) for layer in row) for row in chosen.tolist()]
    assert [row.tobytes() for row in packed] == expected
    assert packed.shape == (20, form.token_bytes)
    np.testing.assert_array_equal(form.unpack(packed), chosen)


def test_every_expert_comes_back() -> None:
    for top_k, experts in SIZES:
        form = RoutedForm(layers=(0,), top_k=top_k, experts=experts)
        for dtype in (np.uint8, np.uint16, np.int64):
            if experts - 1 <= np.iinfo(dtype).max:
                chosen = (np.arange(experts)[:, None, None] + np.arange(top_k)).astype(np.int64) % experts
                np.testing.assert_array_equal(form.unpack(form.from_engine(chosen.astype(dtype))), chosen)


@pytest.mark.parametrize(
    ("layers", "top_k", "experts", "token_bytes"),
    [(48, 8, 128, 336), (40, 8, 256, 320), (58, 8, 256, 464)],
    ids=["Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "DeepSeek-V3"],
)
def test_bytes_of_a_token(layers: int, top_k: int, experts: int, token_bytes: int) -> None:
    assert RoutedForm(tuple(range(layers)), top_k, experts).token_bytes == token_bytes


def test_a_rank_selects_its_layers() -> None:
    form = RoutedForm(layers=(0, 2, 3), top_k=2, experts=8)
    chosen = draw(6, 3, 2, 8)
    for layers in ([1], [0, 2], [2, 1, 0], []):
        own = form.select_layers(form.pack(chosen), layers)
        np.testing.assert_array_equal(form.unpack(own), chosen[:, layers])


def test_layers_without_experts_are_left_out() -> None:
    form = RoutedForm.from_shape(parse_model_shape({**QWEN3_MOE, "mlp_only_layers": [1]}))
    assert form == RoutedForm(layers=(0, 2, 3), top_k=2, experts=8)
    chosen = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2) % 8
    assert form.unpack(form.from_engine(chosen)).tolist() == [[row[0], row[2], row[3]] for row in chosen.tolist()]


def test_what_does_not_fit_the_model_is_a_defect() -> None:
    form = RoutedForm(layers=(0, 3), top_k=2, experts=8)
    with pytest.raises(AssertionError, match="3 layers, and layer 3 has experts"):
        form.from_engine(np.zeros((1, 3, 2), np.uint8))
    with pytest.raises(AssertionError, match="4 experts of a token, expected 2"):
        form.from_engine(np.zeros((1, 4, 4), np.uint8))
    with pytest.raises(AssertionError, match="3 rows of 2 tokens"):
        form.concatenate([(2, np.zeros((3, 2), np.uint8))])
