"""Generalised advantage estimation, KL estimators and divergences against exact sums."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.loop_schema import PPOAdvantageConfig
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.divergence import (
    KLType,
    divergences,
    effective_sample_size,
    find_inconsistent_sequences,
    kl_estimate,
)
from megatron_grpo.losses.loss import GlobalCounts, Segments
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value import estimate_advantages, gae, length_adaptive_lambda, token_rewards, whiten

LENGTHS = [4, 1, 7, 0, 3]


def make_case(lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random token rewards and values, [sum(lengths)], float64."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    return rewards, values


def brute_force(rewards: Tensor, values: Tensor, lengths: list[int], gamma: float, lam: list[float]) -> Tensor:
    """Schulman et al. 2016, eq. 16: A_t = sum_l (gamma lambda)^l delta_(t+l), each sum written out."""
    out: list[float] = []
    start = 0
    for length, one in zip(lengths, lam, strict=True):
        r = rewards[start : start + length].tolist()
        v = [*values[start : start + length].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        out += [sum((gamma * one) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        start += length
    return torch.tensor(out, dtype=torch.float64)


def reward_to_go(rewards: Tensor, lengths: list[int], gamma: float) -> Tensor:
    out = []
    for piece in rewards.split(lengths):
        out += [sum(gamma ** (k - t) * float(piece[k]) for k in range(t, len(piece))) for t in range(len(piece))]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_equals_its_sum(gamma: float, lam: float) -> None:
    rewards, values = make_case()
    expected = brute_force(rewards, values, LENGTHS, gamma, [lam] * len(LENGTHS))
    actual = gae(rewards, values, LENGTHS, gamma, torch.full((len(LENGTHS),), lam))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.floats(0.5, 1), st.integers(0, 99))
@settings(max_examples=40)
def test_gae_with_a_lambda_for_each_response(lengths: list[int], gamma: float, seed: int) -> None:
    rewards, values = make_case(lengths, seed)
    lam = [random.Random(seed + i).random() for i in range(len(lengths))]
    actual = gae(rewards, values, lengths, gamma, torch.tensor(lam, dtype=torch.float64))
    torch.testing.assert_close(actual, brute_force(rewards, values, lengths, gamma, lam), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_one_is_reward_to_go_minus_value_and_lambda_zero_the_td_error(gamma: float) -> None:
    rewards, values = make_case()
    ones = torch.ones(len(LENGTHS))
    to_go = reward_to_go(rewards, LENGTHS, gamma)
    torch.testing.assert_close(gae(rewards, values, LENGTHS, gamma, ones), to_go - values, atol=1e-12, rtol=0)
    following = torch.cat([torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) for v in values.split(LENGTHS)])
    td = rewards + gamma * following - values
    torch.testing.assert_close(gae(rewards, values, LENGTHS, gamma, 0 * ones), td, atol=1e-12, rtol=0)


def test_with_exact_values_nothing_is_an_advantage() -> None:
    rewards, _ = make_case()
    values = reward_to_go(rewards, LENGTHS, 0.9)
    for lam in (0.0, 0.4, 1.0):
        advantages = gae(rewards, values, LENGTHS, 0.9, torch.full((len(LENGTHS),), lam))
        assert advantages.abs().max() < 1e-12


def test_a_response_does_not_see_its_neighbours() -> None:
    rewards, values = make_case()
    lam = torch.full((len(LENGTHS),), 0.7)
    whole = gae(rewards, values, LENGTHS, 0.9, lam).split(LENGTHS)
    for i, (r, v) in enumerate(zip(rewards.split(LENGTHS), values.split(LENGTHS), strict=True)):
        torch.testing.assert_close(whole[i], gae(r, v, [len(r)], 0.9, lam[:1]), atol=1e-14, rtol=0)


def test_rewards_come_at_the_last_token_and_penalties_at_each() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 9.0, 5.0])
    expected = torch.zeros(15)
    expected[[3, 4, 11, 14]] = torch.tensor([1.0, 2.0, 3.0, 5.0])
    assert torch.equal(token_rewards(rewards, LENGTHS), expected)
    penalty = torch.arange(15.0)
    torch.testing.assert_close(token_rewards(rewards, LENGTHS, penalty), expected - penalty)


def test_length_adaptive_lambda_by_hand() -> None:
    actual = length_adaptive_lambda([10, 20, 100, 1000, 0], alpha=0.05)
    torch.testing.assert_close(actual, torch.tensor([0.0, 0.0, 0.8, 0.98, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("keys", "lambda_policy", "lambda_value"),
    [
        ({}, [0.95] * 5, [0.95] * 5),
        ({"gae_lambda": 0.3}, [0.3] * 5, [0.3] * 5),
        ({"gae_lambda": 0.3, "gae_lambda_value": 1.0}, [0.3] * 5, [1.0] * 5),
        ({"gae_lambda_policy": 0.0, "gae_gamma": 0.5}, [0.0] * 5, [0.95] * 5),
        ({"length_adaptive_alpha": 0.0, "gae_lambda": 0.3}, [0.3] * 5, [0.3] * 5),
        ({"length_adaptive_alpha": 0.5, "gae_lambda_value": 1.0}, [0.5, 0.0, 1 - 1 / 3.5, 0.0, 1 / 3], [1.0] * 5),
    ],
    ids=["one lambda", "another", "value", "policy", "alpha 0 is off", "length"],
)
def test_policy_and_value_have_their_own_lambda(
    keys: dict[str, Any], lambda_policy: list[float], lambda_value: list[float]
) -> None:
    rewards, values = make_case()
    config = PPOAdvantageConfig(**keys)
    actual = estimate_advantages(rewards, values, LENGTHS, config)
    gamma = keys.get("gae_gamma", 1.0)
    expected = brute_force(rewards, values, LENGTHS, gamma, lambda_policy)
    torch.testing.assert_close(actual.advantages, expected, atol=1e-12, rtol=1e-12)
    returns = brute_force(rewards, values, LENGTHS, gamma, lambda_value) + values
    torch.testing.assert_close(actual.returns, returns, atol=1e-12, rtol=1e-12)


def test_monte_carlo_returns_do_not_depend_on_the_values() -> None:
    rewards, values = make_case()
    config = PPOAdvantageConfig(gae_lambda_value=1.0)
    expected = reward_to_go(rewards, LENGTHS, 1.0)
    for guess in (values, 3 * values):
        returns = estimate_advantages(rewards, guess, LENGTHS, config).returns
        torch.testing.assert_close(returns, expected, atol=1e-12, rtol=0)


def test_raw_reward_is_the_reward_at_every_token() -> None:
    rewards = torch.tensor([1.0, -2.0, 0.5, 0.0, 4.0])
    by_token = token_rewards(rewards, LENGTHS)
    _, values = make_case()
    estimate = estimate_advantages(by_token, values, LENGTHS, PPOAdvantageConfig(name="raw_reward"))
    expected = torch.tensor([r for r, n in zip(rewards.tolist(), LENGTHS, strict=True) for _ in range(n)])
    torch.testing.assert_close(estimate.advantages, expected.double())
    torch.testing.assert_close(estimate.returns, expected.double())


def test_raw_reward_is_discounted_token_by_token() -> None:
    rewards, values = make_case()
    estimate = estimate_advantages(rewards, values, LENGTHS, PPOAdvantageConfig(name="raw_reward", gae_gamma=0.9))
    expected = reward_to_go(rewards, LENGTHS, 0.9)
    torch.testing.assert_close(estimate.advantages, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(estimate.returns, expected, atol=1e-12, rtol=1e-12)


def test_whitening_by_hand_leaves_the_rest_out() -> None:
    values = torch.tensor([1.0, math.nan, 2.0, 6.0, 100.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False])
    std = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2)
    expected = torch.tensor([-2 / std, 0.0, -1 / std, 3 / std, 0.0], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("inside", [0, 1, 3])
def test_nothing_to_compare_gives_zeros(inside: int) -> None:
    mask = torch.arange(4) < inside
    assert torch.equal(whiten(torch.full((4,), 0.1), mask), torch.zeros(4))


def distributions() -> tuple[Tensor, Tensor]:
    """Logits of a policy, and the log-probabilities of a reference."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kl_type: KLType) -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kl_type)).sum(), exact)


@pytest.mark.parametrize("kl_type", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(kl_type: KLType) -> None:
    logits, reference = distributions()
    assert kl_estimate(logits.log_softmax(0), reference, kl_type).min() >= 0


def expected_gradient(kl_type: KLType) -> Tensor:
    """Of the estimate as a loss: the tokens are drawn, so their probabilities have no gradient."""
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    (policy.exp().detach() * kl_estimate(policy, reference, kl_type)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_as_a_loss_k2_has_the_gradient_of_the_divergence_and_k1_has_none() -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    (policy.exp() * (policy - reference)).sum().backward()
    torch.testing.assert_close(expected_gradient("k2"), logits.grad)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(50, dtype=torch.float64))


def test_as_a_loss_k3_has_the_gradient_of_the_reversed_divergence() -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    (reference.exp() * (reference - policy)).sum().backward()
    torch.testing.assert_close(expected_gradient("k3"), logits.grad)


def test_clamps_bound_the_log_ratio_and_the_estimate() -> None:
    policy, reference = torch.tensor([-1.0, -60.0, 0.0]), torch.tensor([-1.5, 0.0, -60.0])
    estimate = kl_estimate(policy, reference, "k3", input_clamp=2.0, output_clamp=4.0)
    e = torch.tensor([-0.5, 2.0, -2.0])
    torch.testing.assert_close(estimate, (e.exp() - 1 - e).clamp(max=4.0))
    assert kl_estimate(policy, reference, "k1", output_clamp=0.25).tolist() == [0.25, -0.25, 0.25]


TOKENS, LENGTH = 3, 3
RESPONSES = list(itertools.product(range(TOKENS), repeat=LENGTH))


def logprobs_of(tables: list[Tensor]) -> Tensor:
    """[responses, length]: of every response, under a policy whose table t has a row for each beginning of t tokens."""
    rows = []
    for response in RESPONSES:
        row = []
        for place, token in enumerate(response):
            begun = sum(one * TOKENS**power for power, one in enumerate(response[:place]))
            row.append(tables[place].log_softmax(-1)[begun, token])
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.fixture
def policies() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(4)
    policy = [torch.randn(TOKENS**place, TOKENS, dtype=torch.float64, requires_grad=True) for place in range(LENGTH)]
    reference = [torch.randn(TOKENS**place, TOKENS, dtype=torch.float64) for place in range(LENGTH)]
    return policy, reference


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("flat", [False, True])
def test_its_expectation_is_the_gradient_of_the_divergence(
    policies: tuple[list[Tensor], list[Tensor]], kind: str, flat: bool
) -> None:
    policy, reference = policies
    exact_logprobs = logprobs_of(policy).sum(dim=1)
    divergence = (exact_logprobs.exp() * (exact_logprobs - logprobs_of(reference).sum(dim=1))).sum()
    expected = torch.autograd.grad(divergence, policy)

    actual = gradient(policy, reference, kind, flat, score_function=True)
    torch.testing.assert_close(actual, expected)
    without = gradient(policy, reference, kind, flat, score_function=False)
    assert max(float((one - other).abs().max()) for one, other in zip(without, expected, strict=True)) > 0.05


def gradient(
    policy: list[Tensor], reference: list[Tensor], kind: str, flat: bool, *, score_function: bool
) -> tuple[Tensor, ...]:
    """Expected gradient of the loss, each response with its probability, and with nothing but the penalty in it."""
    config = LossConfig(
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type=kind,  # type: ignore[arg-type]
        kl_score_function_gradient=score_function,
        constant_normalizer_tokens=1,
    )
    curr, under_reference = logprobs_of(policy), logprobs_of(reference)
    probabilities = curr.detach().sum(dim=1).exp()
    total: list[Tensor] = [torch.zeros_like(table) for table in policy]
    for number, probability in enumerate(probabilities):
        loss = one_loss(config, curr[[number]], under_reference[[number]], flat)
        for place, part in enumerate(torch.autograd.grad(loss, policy, retain_graph=True, allow_unused=True)):
            total[place] += 0 if part is None else probability * part
    return tuple(total)


def one_loss(config: LossConfig, curr: Tensor, reference: Tensor, flat: bool) -> Tensor:
    def shaped(values: Tensor) -> Tensor:
        return values.flatten() if flat else values

    fields = TokenFields(
        loss_mask=shaped(torch.ones_like(curr)),
        advantages=shaped(torch.zeros_like(curr)),
        generation_logprobs=shaped(curr.detach()),
        reference_logprobs=shaped(reference),
    )
    counts = GlobalCounts(tokens=float(LENGTH), sequences=1.0, all_sequences=1.0, positive_tokens=0.0)
    segments = Segments(torch.zeros(LENGTH, dtype=torch.int64), torch.full((1,), float(LENGTH))) if flat else None
    return ClippedPGLossFn(config)(shaped(curr), fields, counts, segments)[0]


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
