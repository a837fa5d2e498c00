"""The value loss against loops in float64, and the gradient of pairs against autograd."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.loop_schema import MseValueLossConfig
from megatron_grpo.config.schema import DPOConfig
from megatron_grpo.losses.loss import GlobalCounts, combine_metrics
from megatron_grpo.losses.preference import SequenceGradientLossFn, compute_preference_loss, compute_score_loss
from megatron_grpo.losses.value import MseValueLossFn, add_explained_variance
from tests.support.token_fields import mapped


def make_batch(rows: int = 6, length: int = 9) -> tuple[Tensor, TokenFields, GlobalCounts]:
    """Values, the loss's entries and counts; NaN outside the mask."""
    generator = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, rows, length, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, length, generator=generator) < 0.6).double()
    outside = mask == 0
    for tensor in (values, old, returns):
        tensor[outside] = math.nan
    tokens = TokenFields(loss_mask=mask, values=old, returns=returns)
    return values, tokens, GlobalCounts(tokens=float(mask.sum()), sequences=rows, all_sequences=rows)


ONE = GlobalCounts(tokens=1.0, sequences=1.0, all_sequences=1.0)


def by_hand(values: Tensor, tokens: TokenFields, clip: float | None) -> tuple[float, float]:
    """(loss, clip fraction), token by token."""
    losses, clipped = [], []
    columns = (values, tokens.values, tokens.returns, tokens.loss_mask)
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
    tokens = mapped(tokens, Tensor.nan_to_num)
    loss_fn = MseValueLossFn(MseValueLossConfig(value_clip=clip))
    values = values.nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: loss_fn(v, tokens, counts)[0], values)


def test_nothing_outside_the_mask_gets_a_gradient() -> None:
    values, tokens, counts = make_batch()
    values.requires_grad_()
    MseValueLossFn(MseValueLossConfig())(values, tokens, counts)[0].backward()
    assert torch.equal(values.grad[tokens.loss_mask == 0], torch.zeros(int((tokens.loss_mask == 0).sum())).double())


def test_a_value_past_the_clip_only_returns() -> None:
    """Moved by 1 with clip 0.2: towards the return there is no gradient left, away from it there is all of it."""
    for target, expected in ((3.0, 0.0), (-1.0, 2.0)):
        value = torch.tensor([[1.0]], requires_grad=True)
        tokens = TokenFields(
            loss_mask=torch.tensor([[1.0]]), values=torch.tensor([[0.0]]), returns=torch.tensor([[target]])
        )
        loss, _ = MseValueLossFn(MseValueLossConfig(value_clip=0.2))(value, tokens, ONE)
        loss.backward()
        assert value.grad.item() == expected


@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(1, 5)), padding=st.integers(0, 4))
def test_it_does_not_matter_how_the_step_is_cut_up(order: list[int], cuts: set[int], padding: int) -> None:
    """Order of the sequences, microbatches and padding."""
    values, tokens, counts = make_batch()
    values.requires_grad_()
    loss_fn = MseValueLossFn(MseValueLossConfig())

    def step(parts: list[list[int]], padding: int) -> tuple[dict[str, float], Tensor]:
        shares, total = [], torch.zeros((), dtype=torch.float64)
        for rows in parts:
            loss, metrics = loss_fn(
                pad(values[rows], (0, padding), value=math.nan),
                mapped(tokens, lambda entry, rows=rows: pad(entry[rows], (0, padding))),
                counts,
            )
            total = total + loss
            shares.append({name: float(value) for name, value in metrics.items()})
        (gradient,) = torch.autograd.grad(total, values)
        return combine_metrics(shares), gradient

    bounds = [0, *sorted(cuts), 6]
    whole, whole_gradient = step([list(range(6))], 0)
    actual, gradient = step([order[a:b] for a, b in itertools.pairwise(bounds)], padding)
    assert actual == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(gradient, whole_gradient)


def finished(values: Tensor, tokens: TokenFields, counts: GlobalCounts) -> dict[str, float]:
    shares = MseValueLossFn(MseValueLossConfig())(values, tokens, counts)[1]
    metrics = {name: float(value) for name, value in shares.items()}
    add_explained_variance(metrics)
    return metrics


def test_explained_variance_is_that_of_the_values_before_the_step() -> None:
    """The current ones have been fitted to these very returns: they would explain them however poor the model is."""
    values, tokens, counts = make_batch()
    metrics = finished(values, tokens, counts)
    inside = tokens.loss_mask > 0
    target, error = tokens.returns[inside].tolist(), (tokens.returns - tokens.values)[inside].tolist()
    expected = 1 - statistics.pvariance(error) / statistics.pvariance(target)
    assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-10)
    assert metrics["value_mean"] == pytest.approx(tokens.values[inside].mean().item())
    assert set(metrics) == {"loss", "value_clip_fraction", "value_mean", "return_mean", "explained_variance"}
    fitted = finished(tokens.returns, tokens, counts)
    assert fitted["explained_variance"] == metrics["explained_variance"]


def test_a_constant_error_is_no_variance() -> None:
    values, tokens, counts = make_batch()
    tokens.values = tokens.returns + 5.0
    assert finished(values, tokens, counts)["explained_variance"] == pytest.approx(1.0, abs=1e-10)


def test_returns_that_are_all_the_same_explain_nothing() -> None:
    metrics = {"return_mean": 0.3, "return_squared": 0.09 + 1e-12, "value_error": 0.1, "value_error_squared": 0.5}
    add_explained_variance(metrics)
    assert metrics["explained_variance"] == 0.0


def test_a_scale_is_a_factor_of_the_loss_and_of_no_figure() -> None:
    values, tokens, counts = make_batch()
    plain, figures = MseValueLossFn(MseValueLossConfig())(values, tokens, counts)
    scaled, same = MseValueLossFn(MseValueLossConfig(scale=0.5))(values, tokens, counts)
    assert float(scaled) == pytest.approx(0.5 * float(plain))
    assert same == figures


def test_a_clip_of_0_is_off() -> None:
    values, tokens, counts = make_batch()
    off, _ = MseValueLossFn(MseValueLossConfig(value_clip=0.0))(values, tokens, counts)
    assert float(off) == pytest.approx(by_hand(values, tokens, None)[0])


CASES = {
    "sigmoid": DPOConfig(reference_policy_kl_penalty=0.2),
    "smoothed": DPOConfig(reference_policy_kl_penalty=0.2, label_smoothing=0.2, preference_loss_weight=0.7),
    "averages": DPOConfig(
        preference_average_log_probs=True,
        sft_loss_weight=0.3,
        sft_average_log_probs=True,
        reference_policy_kl_penalty=2,
    ),
    "ipo": DPOConfig(loss_type="ipo", preference_average_log_probs=True, sft_loss_weight=0.1),
    "simpo": DPOConfig(loss_type="simpo", reference_policy_kl_penalty=2, target_margin=0.7, label_smoothing=0.1),
}
PAIRS, LENGTH = 3, 7


def oracle(logprobs: Tensor, reference: Tensor, mask: Tensor, weights: Tensor, config: DPOConfig) -> Tensor:
    """The definition, sequence by sequence: rows 2 n are chosen responses, rows 2 n + 1 rejected ones."""
    total = torch.zeros((), dtype=torch.float64)
    beta = config.reference_policy_kl_penalty
    for pair in range(PAIRS):
        gains, likelihood = [], torch.zeros(())
        for row in (2 * pair, 2 * pair + 1):
            is_simpo = config.loss_type == "simpo"
            gain = ((logprobs[row] - (0 if is_simpo else reference[row])) * mask[row]).sum()
            gains.append(gain / mask[row].sum() if config.preference_average_log_probs or is_simpo else gain)
        chosen = (logprobs[2 * pair] * mask[2 * pair]).sum()
        likelihood = -chosen / mask[2 * pair].sum() if config.sft_average_log_probs else -chosen
        h = gains[0] - gains[1]
        loss = (h - 1 / (2 * beta)) ** 2
        if config.loss_type != "ipo":
            s, h = config.label_smoothing, h - (config.target_margin / beta if is_simpo else 0)
            loss = -logsigmoid(beta * h) * (1 - s) - logsigmoid(-beta * h) * s
        total = total + weights[pair] * (config.preference_loss_weight * loss + config.sft_loss_weight * likelihood)
    return total / weights.sum()


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_the_gradient_by_sequence_is_that_of_the_loss(config: DPOConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    shape = (2 * PAIRS, LENGTH)
    logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    reference = -torch.rand(shape, generator=generator, dtype=torch.float64)
    mask = (torch.rand(shape, generator=generator) < 0.6).double()
    mask[:, 1] = 1
    weights = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    expected = oracle(logprobs, reference, mask, weights, config)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    sums = [(values.detach() * mask).sum(1).view(-1, 2) for values in (logprobs, reference)]
    result = compute_preference_loss(*sums, mask.sum(1).view(-1, 2), weights, config)
    assert result.loss == pytest.approx(expected.item())
    fields = TokenFields(loss_mask=mask, advantages=-result.gradient.flatten()[:, None].expand(shape))
    loss, _ = SequenceGradientLossFn()(logprobs, fields, GlobalCounts(tokens=1, sequences=1, all_sequences=1))
    (actual,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(actual, gradient)


def test_scores_have_the_loss_of_bradley_and_terry() -> None:
    """Against the probability that the chosen response wins, and finite differences."""
    scores = torch.tensor([[0.3, -0.2], [1.0, 1.5], [-0.4, -0.5]], dtype=torch.float64)
    margins, weights = torch.tensor([0.0, 0.25, 1.0]).double(), torch.tensor([1.0, 0.5, 0.0]).double()

    def define(values: Tensor) -> float:
        strength = values.exp()
        chosen = strength[:, 0] / (strength[:, 0] + strength[:, 1] * margins.exp())
        return float(((-chosen.log() + 0.1 * values.sum(1) ** 2) * weights).sum() / weights.sum())

    result = compute_score_loss(scores, margins, weights, 0.1)
    assert result.loss == pytest.approx(define(scores), rel=1e-12)
    for index in range(scores.numel()):
        step = torch.zeros(scores.numel(), dtype=torch.float64).index_fill_(0, torch.tensor(index), 1e-6).view(-1, 2)
        slope = (define(scores + step) - define(scores - step)) / 2e-6
        assert result.gradient.flatten()[index].item() == pytest.approx(slope, abs=1e-8)
    assert result.metrics == pytest.approx(
        {
            "accuracy": 2 / 3,
            "margin": (0.5 + 0.5 * -0.5) / 1.5,
            "mean_reward": (0.1 + 0.5 * 2.5) / 3,
            "min_reward": -0.2,
            "max_reward": 1.5,
            "rewards_chosen_mean": (0.3 + 0.5 * 1.0) / 1.5,
            "rewards_rejected_mean": (-0.2 + 0.5 * 1.5) / 1.5,
        }
    )
