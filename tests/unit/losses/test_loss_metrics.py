"""Metrics of the policy's loss, the loss with filtered tokens, and the loss of distillation, by definition."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.distillation_loss import DistillationLossFn
from megatron_grpo.losses.divergence import find_inconsistent_sequences
from megatron_grpo.losses.loss import GlobalCounts, Segments
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


TOKEN_BY_TOKEN = ("plain", "asymmetric", "dual", "kl", "k2", "correction", "tis", "icepop", "dr_grpo", "cispo", "sapo")
REMOVED = ((0, 2), (3, 4), (5, 2))
"""Tokens of `random_batch` that are in the loss, and that the filter removes."""


def filtered_batch(seed: int, *, by: str) -> tuple[Tensor, TokenFields, Tensor]:
    """A batch whose tokens have other log-probabilities over the whole vocabulary; and the removed ones, bool.

    `by`: curr or prev, under which the tokens are removed.
    """
    curr, tokens = random_batch(seed)
    removed = torch.zeros_like(curr, dtype=torch.bool)
    for place in REMOVED:
        assert tokens.loss_mask[place] > 0
        removed[place] = True
    tokens.unfiltered_logprobs = (
        curr - 0.1 - torch.rand(curr.shape, generator=torch.Generator().manual_seed(seed)).double()
    )
    if by == "curr":
        curr = curr.masked_fill(removed, -math.inf)
    else:
        tokens.prev_logprobs = tokens.prev_logprobs.masked_fill(removed, -math.inf)
    return curr, tokens, removed


@pytest.mark.parametrize("by", ["curr", "prev"])
@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_removed_tokens_leave_the_loss_and_stay_in_its_denominator(name: str, by: str) -> None:
    curr, tokens, removed = filtered_batch(3, by=by)
    curr.requires_grad_()
    tokens.unfiltered_logprobs.requires_grad_()
    loss_fn, counts = ClippedPGLossFn(CONFIGS[name]), counts_of(tokens)
    loss, metrics = loss_fn(curr, tokens, counts)
    rest = replace(tokens, loss_mask=tokens.loss_mask.masked_fill(removed, 0.0))
    expected, _ = loss_fn(curr, rest, counts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["outside_filter_fraction"].item() == pytest.approx(len(REMOVED) / counts.tokens)
    assert all(value.isfinite() for value in metrics.values())
    inputs = (curr, tokens.unfiltered_logprobs)
    found, wanted = (torch.autograd.grad(one, inputs, allow_unused=True) for one in (loss, expected))
    assert (found[0][removed] == 0).all()
    assert found[0].isfinite().all()
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["gspo", "gspo_corrected", "seq_mask_tis", "everything", "sequences"])
def test_responses_with_removed_tokens_are_the_same_in_both_forms(name: str) -> None:
    """In sums and means of a response a removed token is a log ratio of 0; the response does not get shorter."""
    curr, tokens, removed = filtered_batch(4, by="prev")
    loss_fn, counts = ClippedPGLossFn(CONFIGS[name]), counts_of(tokens)
    loss, metrics = loss_fn(curr, tokens, counts)
    rows = torch.arange(len(curr))[:, None].expand_as(curr).flatten()
    segments = Segments(rows, tokens.loss_mask.sum(dim=1).float())
    flat = TokenFields(**{entry: values.flatten() for entry, values in tokens.as_dict().items()})
    again, flat_metrics = loss_fn(curr.flatten(), flat, counts, segments)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert {one: float(value) for one, value in flat_metrics.items()} == pytest.approx(
        {one: float(value) for one, value in metrics.items()}, rel=1e-6
    )
    # The same as a token about which all log-probabilities agree, and whose advantage is 0.
    agreed = {entry: getattr(tokens, entry).masked_fill(removed, 0.0) for entry in ("prev_logprobs", "advantages")}
    agreed |= {
        entry: getattr(tokens, entry).masked_fill(removed, 0.0)
        for entry in ("generation_logprobs", "unfiltered_logprobs", "reference_logprobs")
    }
    expected, _ = loss_fn(curr.masked_fill(removed, 0.0), replace(tokens, **agreed), counts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_kl_compares_whole_distributions(weighted: bool) -> None:
    """Only its weight, the ratio of sampling distributions, is over kept tokens."""
    curr, tokens, removed = filtered_batch(5, by="curr")
    config = LossConfig(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=weighted)
    _, metrics = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
    inside = (tokens.loss_mask > 0) & ~removed
    total = 0.0
    columns = (curr, tokens.unfiltered_logprobs, tokens.prev_logprobs, tokens.reference_logprobs)
    for now, whole, old, reference in zip(*(one[inside].tolist() for one in columns), strict=True):
        kl = math.exp(reference - whole) - (reference - whole) - 1
        total += kl * (math.exp(now - old) if weighted else 1.0)
    assert metrics["kl_penalty"].item() == pytest.approx(total / float(tokens.loss_mask.sum()), rel=1e-9)


def test_without_a_filter_an_infinite_log_probability_is_no_removed_token() -> None:
    curr, tokens, _ = filtered_batch(6, by="prev")
    tokens.unfiltered_logprobs = None
    loss, metrics = ClippedPGLossFn(CONFIGS["plain"])(curr, tokens, counts_of(tokens))
    assert "outside_filter_fraction" not in metrics
    assert metrics["token_mult_prob_error_max"] > 1e10
    assert loss.isfinite()


def test_removed_tokens_do_not_make_a_response_inconsistent() -> None:
    mask = torch.ones(5)
    generation = torch.full((5,), -1.0)
    prev = torch.tensor([-1.0, -math.inf, -1.0 + math.log(1.5), -math.inf, -math.inf])
    beyond, metrics = find_inconsistent_sequences(mask, prev, generation, [3, 2], threshold=1.3)
    assert beyond.tolist() == [False, False]
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(1.25)


MASK = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
COUNTS = GlobalCounts(tokens=3.0, sequences=2.0, all_sequences=2.0)


def make_tokens() -> tuple[torch.Tensor, TokenFields]:
    generator = torch.Generator().manual_seed(1)
    curr, generation, advantages, divergence = torch.randn(4, 2, 3, generator=generator)
    divergence[MASK == 0] = torch.inf  # ignored, whatever it is
    tokens = TokenFields(
        token_ids=torch.zeros(2, 3, dtype=torch.int64),
        loss_mask=MASK,
        generation_logprobs=generation,
        advantages=advantages,
        divergence=divergence.requires_grad_(),
    )
    return curr.requires_grad_(), tokens


def test_alone_it_is_the_mean_divergence_without_advantages() -> None:
    curr, tokens = make_tokens()
    # Terms that belong to GRPO's loss are off, too.
    loss_fn = DistillationLossFn(LossConfig(entropy_coef=0.1, positive_example_nll_weight=0.2))
    loss, metrics = loss_fn(curr, replace(tokens, advantages=None), COUNTS)
    loss.backward()
    expected = tokens.divergence[MASK > 0].mean()
    assert float(loss) == pytest.approx(float(expected))
    assert float(metrics["teacher_divergence"]) == pytest.approx(float(expected))
    assert torch.equal(tokens.divergence.grad, MASK / 3)
    assert curr.grad is None, "the log-probabilities of the sampled tokens are only reported"


def test_sequences_may_weigh_the_same() -> None:
    curr, tokens = make_tokens()
    loss, _ = DistillationLossFn(LossConfig(token_level_loss=False))(curr, tokens, COUNTS)
    expected = (tokens.divergence[0, 1:].mean() + tokens.divergence[1, 1]) / 2
    assert float(loss) == pytest.approx(float(expected))


@pytest.mark.parametrize("token_level", [False, True])
def test_sequences_have_weights_and_shares_of_their_rollouts(token_level: bool) -> None:
    """Two segments of one rollout, of weight 1/4: two thirds of its tokens are in the first."""
    curr, tokens = make_tokens()
    weight, share = MASK * 0.25, MASK * torch.tensor([[2 / 3], [1 / 3]])
    tokens = replace(tokens, weight=weight, rollout_share=share)
    counts = GlobalCounts(tokens=3.0, sequences=0.25, all_sequences=0.25, token_weight=0.25)
    loss, _ = DistillationLossFn(LossConfig(token_level_loss=token_level))(curr, tokens, counts)
    assert float(loss) == pytest.approx(float(tokens.divergence[MASK > 0].mean())), "one rollout: its mean"
    heavier = replace(tokens, weight=MASK * torch.tensor([[0.5], [0.0]]))
    loss, _ = DistillationLossFn(LossConfig(token_level_loss=True))(curr, heavier, replace(counts, token_weight=1 / 3))
    assert float(loss) == pytest.approx(float(tokens.divergence[0, 1:].mean())), "a weight of 0 leaves it out"


def test_beside_rewards_it_adds_the_weighted_loss_of_grpo() -> None:
    config = LossConfig(policy_loss_weight=0.25, reference_policy_kl_penalty=0.0)
    curr, tokens = make_tokens()
    loss, metrics = DistillationLossFn(config)(curr, tokens, COUNTS)
    policy_loss, _ = ClippedPGLossFn(config)(curr, tokens, COUNTS)
    assert float(loss) == pytest.approx(float(tokens.divergence[MASK > 0].mean() + 0.25 * policy_loss))
    assert float(metrics["policy_loss"]) == pytest.approx(float(policy_loss))
    (gradient,) = torch.autograd.grad(loss, curr, retain_graph=True)
    (expected,) = torch.autograd.grad(0.25 * policy_loss, curr)
    torch.testing.assert_close(gradient, expected)
