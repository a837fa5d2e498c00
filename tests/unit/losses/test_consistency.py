"""Divergence estimates against exact sums over small distributions; masking of responses against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.losses.divergence import divergences, effective_sample_size, find_inconsistent_sequences


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p * (p / q).log()).sum())


def test_expected_estimates_are_the_divergences() -> None:
    """The expectation under the sampling distribution, as a sum over all outcomes in float64."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        train, sample = torch.rand(2, 7, generator=generator, dtype=torch.float64).softmax(1)
        estimates = divergences(train.log(), sample.log())
        mean = {name: float((sample * values).sum()) for name, values in estimates.items()}
        mixture = (train + sample) / 2
        assert mean["gen_kl_error"] == pytest.approx(exact_kl(sample, train), rel=1e-9)
        assert mean["policy_kl_error"] == pytest.approx(exact_kl(train, sample), rel=1e-9)
        jensen_shannon = (exact_kl(train, mixture) + exact_kl(sample, mixture)) / 2
        assert mean["js_divergence_error"] == pytest.approx(jensen_shannon, rel=1e-9)
        for values in estimates.values():
            assert (values >= 0).all()


def test_small_differences_are_not_lost_to_rounding() -> None:
    """Near r = 1 all three are half, half and an eighth of the squared log ratio; float32 must not drown that."""
    for delta in (1e-3, -1e-3):
        estimates = divergences(torch.tensor(-1.0 + delta), torch.tensor(-1.0))
        step = float(torch.tensor(-1.0 + delta) + 1.0)
        assert float(estimates["gen_kl_error"]) == pytest.approx(step**2 / 2, rel=0.01)
        assert float(estimates["policy_kl_error"]) == pytest.approx(step**2 / 2, rel=0.01)
        assert float(estimates["js_divergence_error"]) == pytest.approx(step**2 / 8, rel=0.01)
    assert all(float(value) == 0 for value in divergences(torch.tensor(-2.5), torch.tensor(-2.5)).values())


def test_effective_sample_size_of_equal_and_of_lone_weights() -> None:
    for weights in ([2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 5.0, 0.0], [1.0, 2.0, 3.0, 4.0]):
        mean, squared = sum(weights) / 4, sum(w * w for w in weights) / 4
        assert effective_sample_size(mean, squared) == pytest.approx(
            sum(weights) ** 2 / (4 * sum(w * w for w in weights))
        )
    assert effective_sample_size(2.0, 4.0) == 1.0
    assert effective_sample_size(1.25, 6.25) == 0.25
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_inconsistent_responses_are_found() -> None:
    lengths = [3, 4, 2, 3]
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1.0])
    generation = -torch.ones(12)
    prev = generation.clone()
    prev[2] += math.log(1.5)  # response 0: mean (1 + 1.5) / 2
    prev[4] -= math.log(4.0)  # response 1: mean (4 + 1 + 1) / 3, also when the training framework finds it unlikelier
    prev[7] += 50.0  # response 2: outside the mask, so nothing of it counts
    prev[10] = math.nan
    found, metrics = find_inconsistent_sequences(mask, prev, generation, lengths, threshold=1.3)
    assert found.tolist() == [False, True, False, True]
    assert metrics["num_masked_seqs"] == 2
    all_but_nan, metrics = find_inconsistent_sequences(mask[:9], prev[:9], generation[:9], lengths[:3], threshold=2.0)
    assert all_but_nan.tolist() == [False, False, False]
    assert metrics == {"max_seq_mult_prob_error": pytest.approx(2.0, rel=1e-6), "num_masked_seqs": 0}
