"""The metrics of the policy's loss against their definitions, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn, add_derived_metrics
from tests.support.loss_oracle import CONFIGS, counts_of, random_batch


def test_metrics_match_a_loop_over_tokens() -> None:
    curr, tokens = random_batch(6, sequences=16)
    config = CONFIGS["everything"]
    _, metrics = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
    actual = {key: value.item() for key, value in metrics.items() if key != "loss"}
    inside = tokens.loss_mask > 0
    columns = {"curr": curr, **tokens.as_dict()}
    values = zip(*(column[inside].tolist() for column in columns.values()), strict=True)
    rows = [SimpleNamespace(**dict(zip(columns, row, strict=True))) for row in values]
    for row in rows:
        row.ratio = math.exp(row.curr - row.prev_logprobs)
        row.weight = math.exp(row.prev_logprobs - row.generation_logprobs)
        row.further = row.reference_logprobs - row.curr

    def mean(of: Callable[[SimpleNamespace], float]) -> float:
        return math.fsum(map(of, rows)) / len(rows)

    above = config.ratio_clip_min if config.ratio_clip_max is None else config.ratio_clip_max
    low, high, dual = 1 - config.ratio_clip_min, 1 + above, config.ratio_clip_c or 0.0
    smallest = config.truncated_importance_sampling_ratio_min or 0.0
    largest = config.truncated_importance_sampling_ratio or 0.0
    assert actual == pytest.approx(
        {
            "token_mult_prob_error": mean(lambda t: max(t.weight, 1 / t.weight)),
            "token_mult_prob_error_max": max(max(t.weight, 1 / t.weight) for t in rows),
            "sampling_importance_ratio": mean(lambda t: t.weight),
            "sampling_importance_ratio_squared": mean(lambda t: t.weight**2),
            "approx_entropy": mean(lambda t: -t.ratio * t.weight * t.curr),
            "probs_ratio": mean(lambda t: t.ratio),
            "probs_ratio_clamped": mean(lambda t: min(max(t.ratio, low), high)),
            "probs_ratio_min": min(t.ratio for t in rows),
            "probs_ratio_max": max(t.ratio for t in rows),
            "clip_fraction_low": mean(lambda t: t.ratio < low and t.advantages < 0),
            "clip_fraction_high": mean(lambda t: t.ratio > high and t.advantages > 0),
            "clip_fraction_dual": mean(lambda t: t.ratio > dual and t.advantages < 0),
            "kl_penalty": mean(lambda t: t.ratio * (math.exp(t.further) - t.further - 1)),
            "is_oob_ratio": mean(lambda t: not smallest <= t.weight <= largest),
            "gen_kl_error": mean(lambda t: t.weight - 1 - math.log(t.weight)),
            "policy_kl_error": mean(lambda t: t.weight * math.log(t.weight) - t.weight + 1),
            "js_divergence_error": mean(
                lambda t: (t.weight * math.log(2 * t.weight / (1 + t.weight)) + math.log(2 / (1 + t.weight))) / 2
            ),
            "entropy": mean(lambda t: t.entropy),
            "positive_nll_share": mean(lambda t: -t.curr * t.positive),
            "positive_share": mean(lambda t: t.positive),
        },
        rel=1e-6,  # shares are float32
    )
    assert 0 < actual["clip_fraction_dual"] < 1, "the batch has to reach the dual bound to test it"
    add_derived_metrics(actual)
    assert actual["positive_nll"] == pytest.approx(-mean(lambda t: t.curr * t.positive) / mean(lambda t: t.positive))
    kish = math.fsum(t.weight for t in rows) ** 2 / (len(rows) * math.fsum(t.weight**2 for t in rows))
    assert actual["effective_sample_size"] == pytest.approx(kish)
    assert actual.keys().isdisjoint({"positive_nll_share", "sampling_importance_ratio_squared"})


def test_cispo_counts_every_ratio_beyond_its_bounds() -> None:
    """Whatever the sign of the advantage: its weight is bounded on either side."""
    curr, tokens = random_batch(14, sequences=16)
    config = LossConfig(reference_policy_kl_penalty=0.0, use_cispo=True, ratio_clip_min=0.3, ratio_clip_max=0.2)
    _, metrics = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
    inside = tokens.loss_mask > 0
    ratios = [math.exp(value) for value in (curr - tokens.prev_logprobs)[inside].tolist()]
    low, high = sum(ratio < 0.7 for ratio in ratios), sum(ratio > 1.2 for ratio in ratios)
    assert 0 < low < high < len(ratios) / 2, "the batch has to tell the two from each other and from their opposites"
    assert metrics["clip_fraction_low"].item() == pytest.approx(low / len(ratios))
    assert metrics["clip_fraction_high"].item() == pytest.approx(high / len(ratios))
    assert metrics["clip_fraction_dual"].item() == 0


def test_log_ratios_without_bounds_stay_numbers() -> None:
    """A token that one framework gives 0 and the other nearly 1: e^99 would be infinite, infinity minus it NaN."""
    curr, tokens = random_batch(13)
    tokens.generation_logprobs = tokens.prev_logprobs - 99
    for name, config in CONFIGS.items():
        loss, metrics = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
        values = {key: float(value) for key, value in metrics.items()}
        add_derived_metrics(values)
        assert all(map(math.isfinite, [float(loss), *values.values()])), name
