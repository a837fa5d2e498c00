"""Sketches of tensors: linear, exact for equal tensors, and as good an estimate of distances as they say."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.trainer import step_record
from megatron_grpo.trainer.step_record import SKETCH, sketch, sketch_rows


def distance(one: torch.Tensor, other: torch.Tensor, name: str = "weight") -> float:
    pairs = zip(sketch(one, name), sketch(other, name), strict=True)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs))


@pytest.mark.parametrize("shape", [(1,), (63,), (7, 65), (3, 5, 129)])
def test_the_sketch_of_a_difference_is_the_difference_of_the_sketches(shape: tuple[int, ...]) -> None:
    one, other = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    difference = [a - b for a, b in zip(sketch(one, "w"), sketch(other, "w"), strict=True)]
    torch.testing.assert_close(torch.tensor(sketch(one - other, "w")), torch.tensor(difference))


def test_one_changed_element_moves_the_sketch_by_exactly_its_change() -> None:
    tensor = torch.randn(300, 41)
    changed = tensor.clone()
    changed[123, 4] += 0.25
    change = float(changed[123, 4].double() - tensor[123, 4].double())
    assert distance(tensor, changed) == pytest.approx(change, rel=1e-9)
    assert distance(tensor, tensor.clone()) == 0


def test_distances_are_estimated_without_bias_and_within_the_stated_deviation() -> None:
    draw = torch.Generator().manual_seed(0)
    ratios = []
    for number in range(400):
        # Few large columns: elements of equal place in their blocks must not share a sum.
        tensor = torch.randn(64, SKETCH, generator=draw) * torch.tensor([10.0] + [0.1] * (SKETCH - 1))
        norm = float(tensor.double().norm())
        ratios.append(sum(value**2 for value in sketch(tensor, f"tensor {number}")) / norm**2)
    found = torch.tensor(ratios)
    assert float(found.mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / SKETCH / len(found)))
    assert float(found.std()) == pytest.approx(math.sqrt(2 / SKETCH), rel=0.25)


def test_a_tensor_sketched_in_pieces_has_the_same_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = sketch(tensor, "w")
    monkeypatch.setattr(step_record, "_PIECE", 2 * SKETCH)
    torch.testing.assert_close(torch.tensor(sketch(tensor, "w")), torch.tensor(whole))


@pytest.mark.parametrize("width", [1, 5, 64, 65, 300])
def test_rows_have_the_sketches_that_they_have_by_themselves(width: int) -> None:
    rows = torch.randn(7, width)
    expected = torch.tensor([sketch(row, "norm") for row in rows], dtype=torch.float64)
    torch.testing.assert_close(sketch_rows(rows, "norm"), expected)


def test_sketches_of_parts_of_rows_add_up() -> None:
    """Tensor parallelism splits the heads at any column."""
    rows = torch.randn(7, 300)
    parts = [sketch_rows(rows[:, begin:end], "heads", begin) for begin, end in ((0, 50), (50, 190), (190, 300))]
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), sketch_rows(rows, "heads"))
