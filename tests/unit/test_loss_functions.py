"""The clipped policy-gradient loss against loops over tokens, exact expectations, finite differences and TRL."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.algorithms.kl import kl_k3
from megatron_grpo.algorithms.loss_functions import ClippedPGLossFn
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.policy.interface import GlobalCounts

CONFIGS = {
    "plain": LossConfig(reference_policy_kl_penalty=0.0),
    "asymmetric": LossConfig(reference_policy_kl_penalty=0.0, ratio_clip_min=0.1, ratio_clip_max=0.3),
    "dual": LossConfig(reference_policy_kl_penalty=0.0, ratio_clip_c=1.5),
    "kl": LossConfig(reference_policy_kl_penalty=0.3),
    "on_policy_kl": LossConfig(reference_policy_kl_penalty=0.3, use_on_policy_kl_approximation=True),
    "correction": LossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True),
    "sequences": LossConfig(reference_policy_kl_penalty=0.1, token_level_loss=False),
    "everything": LossConfig(
        reference_policy_kl_penalty=0.2,
        ratio_clip_max=0.28,
        ratio_clip_c=1.4,
        token_level_loss=False,
        use_on_policy_kl_approximation=True,
        use_importance_sampling_correction=True,
    ),
}


def random_batch(seed: int, sequences: int = 6, length: int = 9) -> tuple[Tensor, dict[str, Tensor]]:
    """float64, with ratios from about 0.3 to 3 and the loss on a span in the middle of each row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(sequences, length, generator=generator, dtype=torch.float64) * scale

    curr = -normal(1.0).abs()
    mask = torch.zeros(sequences, length, dtype=torch.float64)
    for row in range(sequences):
        mask[row, 2 : 4 + (row * 5) % (length - 4)] = 1.0
    tokens = {
        "loss_mask": mask,
        "advantages": normal(1.0),
        "prev_logprobs": curr + normal(0.5),
        "generation_logprobs": curr + normal(0.5),
        "reference_logprobs": curr + normal(0.3),
    }
    return curr, tokens


def counts_of(tokens: dict[str, Tensor]) -> GlobalCounts:
    mask = tokens["loss_mask"]
    return GlobalCounts(tokens=float(mask.sum()), sequences=float((mask.sum(dim=1) > 0).sum()))


def loop_loss(curr: Tensor, tokens: dict[str, Tensor], config: LossConfig) -> float:
    """The definition, token by token, in Python floats."""
    sequences = []
    for row in range(curr.shape[0]):
        losses = []
        for t in range(curr.shape[1]):
            if tokens["loss_mask"][row, t] == 0:
                continue
            now, prev = float(curr[row, t]), float(tokens["prev_logprobs"][row, t])
            advantage = float(tokens["advantages"][row, t])
            ratio = math.exp(now - prev)
            clipped = min(max(ratio, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
            objective = min(ratio * advantage, clipped * advantage)
            if config.ratio_clip_c is not None and advantage < 0:
                objective = max(objective, config.ratio_clip_c * advantage)
            if config.use_importance_sampling_correction:
                objective *= math.exp(prev - float(tokens["generation_logprobs"][row, t]))
            difference = float(tokens["reference_logprobs"][row, t]) - now
            kl = math.exp(difference) - difference - 1
            if config.use_on_policy_kl_approximation:
                kl *= ratio
            losses.append(-objective + config.reference_policy_kl_penalty * kl)
        if losses:
            sequences.append(losses)
    if config.token_level_loss:
        return math.fsum(map(math.fsum, sequences)) / sum(map(len, sequences))
    return math.fsum(math.fsum(losses) / len(losses) for losses in sequences) / len(sequences)


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_matches_a_loop_over_tokens(name: str) -> None:
    curr, tokens = random_batch(1)
    loss, metrics = ClippedPGLossFn(CONFIGS[name])(curr, tokens, counts_of(tokens))
    assert loss.item() == pytest.approx(loop_loss(curr, tokens, CONFIGS[name]), rel=1e-12)
    assert metrics["loss"].item() == loss.item()


@pytest.mark.parametrize("name", CONFIGS)
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


def test_k3_is_unbiased_and_never_negative() -> None:
    generator = torch.Generator().manual_seed(8)
    policy, reference = (torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    estimates = kl_k3(policy, reference)
    assert estimates.min() >= 0
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact)


def test_a_penalty_without_a_reference_is_an_error() -> None:
    curr, tokens = random_batch(9)
    del tokens["reference_logprobs"]
    with pytest.raises(ValueError, match="reference_policy_kl_penalty"):
        ClippedPGLossFn(CONFIGS["kl"])(curr, tokens, counts_of(tokens))


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


TRL_CASES = {
    "clipped": (LossConfig(reference_policy_kl_penalty=0.0, ratio_clip_max=0.28), {}),
    "kl": (LossConfig(reference_policy_kl_penalty=0.2), {"beta": 0.2}),
    "on_policy_kl": (
        LossConfig(reference_policy_kl_penalty=0.2, use_on_policy_kl_approximation=True),
        {"beta": 0.2, "bias_correction": True},
    ),
    "sequences": (LossConfig(reference_policy_kl_penalty=0.2, token_level_loss=False), {"beta": 0.2}),
}


@pytest.mark.parametrize("case", TRL_CASES)
def test_loss_and_gradient_equal_trl(case: str) -> None:
    """TRL's own loss code on the same numbers: "bnpo" averages over tokens, "grpo" over sequences."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    config, options = TRL_CASES[case]
    curr, tokens = random_batch(12)
    ours_input, trl_input = curr.clone().requires_grad_(), curr.clone().requires_grad_()
    trainer = trl_stand_in(trl_input, config, **options)
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(6, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(6, 9, dtype=torch.int64),
        "completion_mask": tokens["loss_mask"],
        "advantages": tokens["advantages"],
        "old_per_token_logps": tokens["prev_logprobs"],
        "ref_per_token_logps": tokens["reference_logprobs"],
        "num_items_in_batch": tokens["loss_mask"].sum(),
    }
    expected = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()
    actual, _ = ClippedPGLossFn(config)(ours_input, tokens, counts_of(tokens))
    actual.backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours_input.grad, trl_input.grad)


def trl_stand_in(curr: Tensor, config: LossConfig, beta: float = 0.0, bias_correction: bool = False) -> Any:
    """What GRPOTrainer._compute_loss reads of its trainer."""
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (curr, torch.zeros_like(curr), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type="bnpo" if config.token_level_loss else "grpo",
        epsilon_low=config.ratio_clip_min,
        epsilon_high=config.ratio_clip_max,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=bias_correction),
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda value: value, reduce=lambda value, reduction: value, num_processes=1),
        _metrics={"train": defaultdict(list)},
    )
