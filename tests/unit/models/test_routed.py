"""The form of routed experts: which layers of an engine's are kept, and in which type."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
from tests.support.moe_config import QWEN3_MOE


def test_layers_without_experts_are_left_out() -> None:
    form = RoutedForm.from_shape(parse_model_shape({**QWEN3_MOE, "mlp_only_layers": [1]}))
    assert form == RoutedForm(layers=(0, 2, 3), top_k=2, experts=8)
    chosen = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2)
    routed = form.from_engine(chosen)
    assert routed.dtype == np.int8
    assert routed.tolist() == [[*row[0], *row[2], *row[3]] for row in chosen.tolist()]


@pytest.mark.parametrize(("experts", "dtype"), [(128, np.int8), (129, np.int16), (256, np.int16)])
def test_the_type_holds_the_last_expert(experts: int, dtype: type) -> None:
    form = RoutedForm(layers=(0,), top_k=1, experts=experts)
    assert form.dtype == dtype
    for returned in (np.uint8, np.uint16):
        last = np.array([[[experts - 1]]], dtype=returned)
        assert form.from_engine(last).tolist() == [[experts - 1]]


def test_what_does_not_fit_the_model_is_a_defect() -> None:
    form = RoutedForm(layers=(0, 3), top_k=2, experts=8)
    with pytest.raises(AssertionError, match="3 layers, and layer 3 has experts"):
        form.from_engine(np.zeros((1, 3, 2), np.uint8))
    with pytest.raises(AssertionError, match="4 experts of a token, expected 2"):
        form.from_engine(np.zeros((1, 4, 4), np.uint8))
    with pytest.raises(AssertionError, match="3 rows of 2 tokens"):
        form.concatenate([(2, np.zeros((3, 4), np.int8))])
