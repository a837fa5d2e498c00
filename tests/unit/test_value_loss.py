"""The value loss against its definition in float64 loops, finite differences, splits of the step, and a variance."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.value_loss import MseValueLossFn, add_explained_variance
from megatron_grpo.config.ppo_schema import MseValueLossConfig
from megatron_grpo.policy.interface import GlobalCounts
from megatron_grpo.policy.megatron_policy import combine_metrics


def make_batch(rows: int = 6, length: int = 9) -> tuple[Tensor, dict[str, Tensor], GlobalCounts]:
    """Values, the loss's entries and counts; NaN outside the mask."""
    generator = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, rows, length, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, length, generator=generator) < 0.6).double()
    outside = mask == 0
    for tensor in (values, old, returns):
        tensor[outside] = math.nan
    tokens = {"loss_mask": mask, "values": old, "returns": returns}
    return values, tokens, GlobalCounts(tokens=float(mask.sum()), sequences=float(rows))


def by_hand(values: Tensor, tokens: dict[str, Tensor], clip: float | None) -> tuple[float, float]:
    """(loss, clip fraction), token by token."""
    losses, clipped = [], []
    columns = (values, tokens["values"], tokens["returns"], tokens["loss_mask"])
    for v, old, target, inside in zip(*(column.flatten().tolist() for column in columns), strict=True):
        if not inside:
            continue
        plain = (v - target) ** 2
        bound = plain if clip is None else (min(max(v, old - clip), old + clip) - target) ** 2
        losses.append(0.5 * max(plain, bound))
        clipped.append(bound > plain)
    return statistics.fmean(losses), statistics.fmean(clipped)


@pytest.mark.parametrize("clip", [None, 0.1, 0.5, 100.0])
def test_the_loss_is_its_definition(clip: float | None) -> None:
    values, tokens, counts = make_batch()
    loss, metrics = MseValueLossFn(MseValueLossConfig(value_clip=clip))(values, tokens, counts)
    expected, fraction = by_hand(values, tokens, clip)
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    assert float(metrics["value_clip_fraction"]) == pytest.approx(fraction, abs=1e-7)  # counted in float32
    assert fraction > 0 or clip in (None, 100.0)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_gradient_is_that_of_finite_differences(clip: float | None) -> None:
    values, tokens, counts = make_batch(2, 4)
    tokens = {name: tensor.nan_to_num() for name, tensor in tokens.items()}
    loss_fn = MseValueLossFn(MseValueLossConfig(value_clip=clip))
    values = values.nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: loss_fn(v, tokens, counts)[0], values)


def test_nothing_outside_the_mask_gets_a_gradient() -> None:
    values, tokens, counts = make_batch()
    values.requires_grad_()
    MseValueLossFn(MseValueLossConfig())(values, tokens, counts)[0].backward()
    assert values.grad is not None
    assert torch.equal(
        values.grad[tokens["loss_mask"] == 0], torch.zeros(int((tokens["loss_mask"] == 0).sum())).double()
    )


def test_a_value_past_the_clip_only_returns() -> None:
    """Moved by 1 with clip 0.2: towards the return there is no gradient left, away from it there is all of it."""
    for target, expected in ((3.0, 0.0), (-1.0, 2.0)):
        value = torch.tensor([[1.0]], requires_grad=True)
        tokens = {name: torch.tensor([[number]]) for name, number in (("loss_mask", 1.0), ("values", 0.0))}
        tokens["returns"] = torch.tensor([[target]])
        loss, _ = MseValueLossFn(MseValueLossConfig(value_clip=0.2))(value, tokens, GlobalCounts(1.0, 1.0))
        loss.backward()
        assert value.grad is not None
        assert value.grad.item() == expected


def test_shares_of_microbatches_add_up() -> None:
    values, tokens, counts = make_batch()
    loss_fn = MseValueLossFn(MseValueLossConfig())
    whole = {name: float(value) for name, value in loss_fn(values, tokens, counts)[1].items()}
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = loss_fn(values[rows], {name: tensor[rows] for name, tensor in tokens.items()}, counts)[1]
        parts.append({name: float(value) for name, value in part.items()})
    assert combine_metrics(parts) == pytest.approx(whole, abs=1e-7)


def test_explained_variance_by_hand() -> None:
    values, tokens, counts = make_batch()
    metrics = {name: float(v) for name, v in MseValueLossFn(MseValueLossConfig())(values, tokens, counts)[1].items()}
    add_explained_variance(metrics)
    inside = tokens["loss_mask"] > 0
    target, error = tokens["returns"][inside].tolist(), (tokens["returns"] - values)[inside].tolist()
    expected = 1 - statistics.pvariance(error) / statistics.pvariance(target)
    assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-10)
    assert set(metrics) == {"loss", "value_clip_fraction", "value_mean", "return_mean", "explained_variance"}


def test_a_constant_error_is_no_variance() -> None:
    _, tokens, counts = make_batch()
    shares = MseValueLossFn(MseValueLossConfig())(tokens["returns"] + 5.0, tokens, counts)[1]
    metrics = {name: float(value) for name, value in shares.items()}
    add_explained_variance(metrics)
    assert metrics["explained_variance"] == pytest.approx(1.0, abs=1e-10)


def test_returns_that_are_all_the_same_explain_nothing() -> None:
    metrics = {"return_mean": 0.3, "return_squared": 0.09 + 1e-12, "value_error": 0.1, "value_error_squared": 0.5}
    add_explained_variance(metrics)
    assert metrics["explained_variance"] == 0.0
