"""The policy-gradient loss and its variants against loops over tokens, exact expectations and finite differences."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.algorithms.loss_functions import ClippedPGLossFn
from megatron_grpo.algorithms.sampling_correction import sampling_correction
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.policy.interface import GlobalCounts
from tests.loss_oracle import CONFIGS, counts_of, loop_loss, random_batch


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_matches_a_loop_over_tokens(name: str) -> None:
    curr, tokens = random_batch(1)
    loss, metrics = ClippedPGLossFn(CONFIGS[name])(curr, tokens, counts_of(tokens))
    assert loss.item() == pytest.approx(loop_loss(curr, tokens, CONFIGS[name]), rel=1e-12)
    assert metrics["loss"].item() == loss.item()


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not config.use_cispo])
def test_gradient_matches_finite_differences(name: str) -> None:
    curr, tokens = random_batch(2, sequences=3, length=6)
    loss_fn = ClippedPGLossFn(CONFIGS[name])
    assert torch.autograd.gradcheck(
        lambda x: loss_fn(x, tokens, counts_of(tokens))[0], (curr.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_may_hold_anything(name: str) -> None:
    curr, tokens = random_batch(3)
    dirty = {key: value.clone() for key, value in tokens.items()}
    outside = tokens["loss_mask"] == 0
    dirty["prev_logprobs"][outside] = math.inf
    dirty["generation_logprobs"][outside] = math.nan
    dirty["reference_logprobs"][outside] = math.nan
    dirty["entropy"][outside] = math.nan
    dirty["positive"][outside] = math.nan
    dirty["advantages"][outside] = -math.inf
    clean_input, dirty_input = curr.clone(), curr.clone()
    dirty_input[outside] = -math.inf
    results = []
    for values, batch in ((clean_input, tokens), (dirty_input, dirty)):
        values.requires_grad_()
        loss, metrics = ClippedPGLossFn(CONFIGS[name])(values, batch, counts_of(tokens))
        loss.backward()
        results.append((loss.detach(), values.grad, metrics))
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)
    assert results[1][1] is not None
    assert torch.count_nonzero(results[1][1][outside]) == 0


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    cut=st.integers(1, 5),
    padding=st.integers(0, 4),
    order=st.permutations(range(6)),
)
def test_loss_does_not_depend_on_the_split_the_order_or_the_padding(
    name: str, cut: int, padding: int, order: list[int]
) -> None:
    curr, tokens = random_batch(4)
    counts = counts_of(tokens)
    loss_fn = ClippedPGLossFn(CONFIGS[name])
    whole, whole_metrics = loss_fn(curr, tokens, counts)

    def part(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        def pad(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(values[rows], (0, padding))

        return loss_fn(pad(curr), {key: pad(value) for key, value in tokens.items()}, counts)

    parts = [part(order[:cut]), part(order[cut:])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    for key, value in whole_metrics.items():
        shares = torch.stack([metrics[key] for _, metrics in parts])
        reduced = shares.amax() if key.endswith("_max") else shares.amin() if key.endswith("_min") else shares.sum()
        torch.testing.assert_close(reduced, value, msg=lambda text, key=key: f"{key}: {text}")


def test_without_previous_logprobs_the_step_is_on_policy() -> None:
    curr, tokens = random_batch(5)
    del tokens["prev_logprobs"]
    config = CONFIGS["plain"]
    values = curr.clone().requires_grad_()
    loss, metrics = ClippedPGLossFn(config)(values, tokens, counts_of(tokens))
    loss.backward()
    mask, advantages = tokens["loss_mask"], tokens["advantages"]
    assert values.grad is not None
    # At ratio 1 the gradient is REINFORCE's: -A * d(logprob), averaged over tokens.
    torch.testing.assert_close(values.grad, -advantages * mask / mask.sum())
    assert metrics["probs_ratio"].item() == pytest.approx(1.0)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


def test_cispo_gives_every_token_its_clipped_ratio_as_weight() -> None:
    curr, tokens = random_batch(13)
    config = LossConfig(reference_policy_kl_penalty=0.0, use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.3)
    values = curr.clone().requires_grad_()
    ClippedPGLossFn(config)(values, tokens, counts_of(tokens))[0].backward()
    weights = (curr - tokens["prev_logprobs"]).exp().clamp(max=1.3)
    mask = tokens["loss_mask"]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, -weights * tokens["advantages"] * mask / mask.sum())
    assert (weights == 1.3).any(), "the batch has to reach the bound to test it"


@pytest.mark.parametrize("name", ["plain", "gspo", "cispo", "sapo", "reinforce", "dual"])
def test_on_the_first_step_every_surrogate_has_the_gradient_of_reinforce(name: str) -> None:
    """At ratio 1 nothing is clipped, so all of them are -A * d(logprob), each averaged its own way."""
    curr, tokens = random_batch(14)
    del tokens["prev_logprobs"]
    config = replace(CONFIGS[name], reference_policy_kl_penalty=0.0)
    values = curr.clone().requires_grad_()
    ClippedPGLossFn(config)(values, tokens, counts_of(tokens))[0].backward()
    mask, advantages = tokens["loss_mask"], tokens["advantages"]
    expected = -advantages * mask / mask.sum()
    if name == "gspo":  # one ratio for the response: its gradient spreads the mean advantage over the tokens
        tokens_of = mask.sum(dim=1, keepdim=True)
        expected = -(advantages * mask).sum(dim=1, keepdim=True) / tokens_of * mask / tokens_of / len(mask)
    torch.testing.assert_close(values.grad, expected)


def test_a_forced_on_policy_ratio_ignores_the_old_policy() -> None:
    curr, tokens = random_batch(15)
    config = LossConfig(reference_policy_kl_penalty=0.0, force_on_policy_ratio=True)
    without = {name: value for name, value in tokens.items() if name != "prev_logprobs"}
    gradients = []
    for batch in (tokens, without):
        values = curr.clone().requires_grad_()
        _, metrics = ClippedPGLossFn(config)(values, batch, counts_of(tokens))
        ClippedPGLossFn(config)(values, batch, counts_of(tokens))[0].backward()
        gradients.append(values.grad)
        assert metrics["probs_ratio_max"] == metrics["probs_ratio_min"] == 1
    torch.testing.assert_close(gradients[0], gradients[1], atol=0, rtol=0)


def test_gspo_weighs_a_response_as_the_probability_of_its_text() -> None:
    """The sampling correction at the sequence level makes a mean over samples unbiased: sum over all texts is exact."""
    generator = torch.Generator().manual_seed(16)
    train, sample = (torch.randn(2, 3, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    texts = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    prev, drawn = (policy[torch.arange(2), texts] for policy in (train, sample))
    mask = torch.ones_like(prev, dtype=torch.bool)
    config = replace(CONFIGS["gspo_corrected"], truncated_importance_sampling_type=None)
    weights = sampling_correction(prev, drawn, mask, config).weights[:, 0]
    worth = torch.arange(9, dtype=torch.float64)
    torch.testing.assert_close((drawn.sum(1).exp() * weights * worth).sum(), (prev.sum(1).exp() * worth).sum())


def test_metrics_match_a_loop_over_tokens() -> None:
    curr, tokens = random_batch(6)
    config = CONFIGS["everything"]
    _, metrics = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
    inside = tokens["loss_mask"] > 0
    now, prev, sampled, reference, advantage = (
        values[inside].tolist()
        for values in (
            curr,
            tokens["prev_logprobs"],
            tokens["generation_logprobs"],
            tokens["reference_logprobs"],
            tokens["advantages"],
        )
    )
    n = len(now)
    ratio = [math.exp(a - b) for a, b in zip(now, prev, strict=True)]
    error = [math.exp(abs(a - b)) for a, b in zip(prev, sampled, strict=True)]
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    assert config.ratio_clip_c is not None
    expected = {
        "token_mult_prob_error": sum(error) / n,
        "token_mult_prob_error_max": max(error),
        "sampling_importance_ratio": sum(math.exp(a - b) for a, b in zip(prev, sampled, strict=True)) / n,
        "approx_entropy": -sum(math.exp(a - b) * a for a, b in zip(now, sampled, strict=True)) / n,
        "probs_ratio": sum(ratio) / n,
        "probs_ratio_clamped": sum(min(max(r, low), high) for r in ratio) / n,
        "probs_ratio_min": min(ratio),
        "probs_ratio_max": max(ratio),
        "clip_fraction_low": sum(r < low and a < 0 for r, a in zip(ratio, advantage, strict=True)) / n,
        "clip_fraction_high": sum(r > high and a > 0 for r, a in zip(ratio, advantage, strict=True)) / n,
        "clip_fraction_dual": sum(r > config.ratio_clip_c and a < 0 for r, a in zip(ratio, advantage, strict=True)) / n,
        "kl_penalty": sum(r * (math.exp(q - p) - (q - p) - 1) for r, p, q in zip(ratio, now, reference, strict=True))
        / n,
    }
    weights = [math.exp(a - b) for a, b in zip(prev, sampled, strict=True)]
    assert config.truncated_importance_sampling_ratio is not None
    assert config.truncated_importance_sampling_ratio_min is not None
    limits = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    right = tokens["positive"][inside].tolist()
    expected |= {
        "is_oob_ratio": sum(not limits[0] <= w <= limits[1] for w in weights) / n,
        "sampling_importance_ratio_squared": sum(w**2 for w in weights) / n,
        "gen_kl_error": sum(w - 1 - math.log(w) for w in weights) / n,
        "policy_kl_error": sum(w * math.log(w) - w + 1 for w in weights) / n,
        "js_divergence_error": sum((w * math.log(2 * w / (1 + w)) + math.log(2 / (1 + w))) / 2 for w in weights) / n,
        "entropy": tokens["entropy"][inside].mean().item(),
        "positive_nll": -sum(a * p for a, p in zip(now, right, strict=True)) / sum(right),
    }
    actual = {key: value.item() for key, value in metrics.items() if key != "loss"}
    assert actual == pytest.approx(expected, rel=1e-6)  # shares are float32
    assert 0 < actual["clip_fraction_dual"] < 1, "the batch has to reach the dual bound to test it"


def test_on_policy_kl_has_the_gradient_of_the_exact_divergence() -> None:
    """In expectation over all tokens of a small vocabulary, at ratio 1 and away from it."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(11, generator=generator, dtype=torch.float64, requires_grad=True)
    reference, old = (torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    curr = logits.log_softmax(0)
    exact = (curr.exp() * (curr - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for prev in (curr.detach(), old):
        # Each token of the vocabulary is one sequence, weighted by its probability under the sampling policy. The loss
        # is linear in the weight of a sequence, so the weighted sum of losses is the expectation.
        total = torch.zeros((), dtype=torch.float64)
        for token in range(11):
            tokens = {
                "loss_mask": torch.ones(1, 1),
                "advantages": torch.zeros(1, 1, dtype=torch.float64),
                "generation_logprobs": prev[token].view(1, 1),
                "prev_logprobs": prev[token].view(1, 1),
                "reference_logprobs": reference[token].view(1, 1),
            }
            config = LossConfig(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
            loss, _ = ClippedPGLossFn(config)(curr[token].view(1, 1), tokens, GlobalCounts(tokens=1.0, sequences=1.0))
            total = total + prev[token].exp() * loss
        (actual,) = torch.autograd.grad(total, logits, retain_graph=True)
        torch.testing.assert_close(total.detach(), exact.detach())
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "entry", "key"),
    [
        ("kl", "reference_logprobs", "reference_policy_kl_penalty"),
        ("entropy", "entropy", "entropy_coef"),
        ("imitation", "positive", "positive_example_nll_weight"),
    ],
)
def test_an_option_that_the_data_cannot_support_is_an_error(name: str, entry: str, key: str) -> None:
    curr, tokens = random_batch(9)
    counts = counts_of(tokens)
    del tokens[entry]
    with pytest.raises(ValueError, match=f"loss_fn.{key} needs {entry}"):
        ClippedPGLossFn(CONFIGS[name])(curr, tokens, counts)


@pytest.mark.parametrize("token_level", [True, False])
def test_a_step_without_tokens_in_the_loss_has_loss_zero(token_level: bool) -> None:
    curr, tokens = random_batch(10)
    tokens["loss_mask"] = torch.zeros_like(curr)
    values = curr.clone().requires_grad_()
    config = LossConfig(token_level_loss=token_level)
    loss, _ = ClippedPGLossFn(config)(values, tokens, GlobalCounts(tokens=0.0, sequences=0.0))
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert torch.count_nonzero(values.grad) == 0


def test_the_loss_can_be_sent_to_another_process() -> None:
    curr, tokens = random_batch(11)
    loss_fn = ClippedPGLossFn(CONFIGS["everything"])
    copy = pickle.loads(pickle.dumps(loss_fn))
    assert torch.equal(copy(curr, tokens, counts_of(tokens))[0], loss_fn(curr, tokens, counts_of(tokens))[0])
