"""Objectives, corrections and advantages of recent papers: gradients, and sums over later tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.formulas import CORRECTIONS
from megatron_grpo.config.schema import LossConfig, PolicyConfig
from megatron_grpo.losses.advantages import (
    maxrl,
    opo,
    otb,
    pass_at_k,
    rae,
    update_task_baselines,
)
from megatron_grpo.losses.loss import Segments, onward_sum
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.selections import mark_selected, select_tokens
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from tests.support.coming_layouts import SHAPE
from tests.support.loss_oracle import CONFIGS, METHODS, counts_of, random_batch

LIMITS = {"truncated_importance_sampling_ratio": 1.3, "truncated_importance_sampling_ratio_min": 0.8}


def find_gradient(config: LossConfig, curr: Tensor, tokens: TokenFields) -> Tensor:
    values = curr.clone().requires_grad_()
    ClippedPGLossFn(config)(values, tokens, counts_of(tokens))[0].backward()
    assert values.grad is not None
    return values.grad


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "vespo"])
def test_a_weighted_likelihood_has_its_weight_as_gradient(name: str) -> None:
    """J is a constant times log pi, so its gradient is J / log pi, whatever the constant depends on."""
    curr, tokens = random_batch(31)
    config = replace(CONFIGS[name], reference_policy_kl_penalty=0.0, log_ratio_penalty=0.0)
    expected = torch.zeros_like(curr)
    for i in range(len(curr)):
        inside = tokens.loss_mask[i].nonzero().flatten().tolist()
        row = {key: values[i, inside].tolist() for key, values in {"now": curr, **tokens.as_dict()}.items()}
        for t, position in enumerate(inside):
            objective = METHODS[name](row, math.nan, row["now"][t], row["advantages"][t], t, config)
            expected[i, position] = -objective / row["now"][t] / float(tokens.loss_mask.sum())
    torch.testing.assert_close(find_gradient(config, curr, tokens), expected)
    assert (expected[tokens.loss_mask > 0] == 0).any() == (name != "vespo"), "the batch has to reach the mask"


def test_fipo_gives_advantages_the_influence_of_later_tokens() -> None:
    curr, tokens = random_batch(32)
    config = replace(CONFIGS["fipo"], ratio_clip_min=1.0, ratio_clip_max=1e6, ratio_clip_c=None)
    influence, count = torch.zeros_like(curr), float(tokens.loss_mask.sum())
    shift = (curr - tokens.prev_logprobs) * tokens.loss_mask
    for i, t in itertools.product(range(curr.shape[0]), range(curr.shape[1])):
        future = sum(2 ** (-(k - t) / config.fipo_half_life) * shift[i, k] for k in range(t, curr.shape[1]))
        influence[i, t] = min(max(math.exp(future), 1 - config.fipo_clip_min), 1 + config.fipo_clip_max)
    expected = -shift.exp() * tokens.advantages * influence * tokens.loss_mask / count
    torch.testing.assert_close(find_gradient(config, curr, tokens), expected)


def test_gmpo_has_the_gradient_of_its_definition() -> None:
    """A response is minus the advantage times the geometric mean of ratios, differentiated as it stands."""
    curr, tokens = random_batch(33)
    tokens.advantages = tokens.advantages[:, :1].expand_as(curr)
    config = replace(CONFIGS["gmpo"], reference_policy_kl_penalty=0.0)
    values = curr.clone().requires_grad_()
    low, high = -config.ratio_clip_min, config.ratio_clip_max
    shift, total = values - tokens.prev_logprobs, torch.zeros((), dtype=torch.float64)
    for i in range(len(curr)):
        logs = shift[i][tokens.loss_mask[i] > 0]
        advantage = tokens.advantages[i, 0]
        bounded = logs.clamp(max=high) if advantage > 0 else logs.clamp(min=low)
        total = total - advantage * bounded.exp().prod() ** (1 / len(logs)) / len(curr)
    total.backward()
    torch.testing.assert_close(find_gradient(config, curr, tokens), values.grad)


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.97])
@pytest.mark.parametrize("form", ["rectangle", "flat", "ranks"])
def test_sums_over_later_tokens(form: str, discount: float) -> None:
    """Ranks are simulated: each gets every second token, and the sum over ranks is known beforehand."""
    generator = torch.Generator().manual_seed(5)
    lengths = [7, 1, 4, 2]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    mask[2] = torch.tensor([True, False, True, True, False, True, False, False, False])  # a tool answered in between
    values = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    expected = torch.zeros_like(values)
    for row in range(4):
        places = mask[row].nonzero().flatten().tolist()
        for number, t in enumerate(places):
            terms = (discount ** (k - number) * float(values[row, places[k]]) for k in range(number, len(places)))
            expected[row, t] = math.fsum(terms)
    flat, rows = values[mask], mask.nonzero()[:, 0]
    sizes = mask.sum(dim=1).float()
    if form == "rectangle":
        torch.testing.assert_close(onward_sum(values, mask, None, discount), expected)
        return
    every = torch.ones(len(flat), dtype=torch.bool)
    if form == "flat":
        torch.testing.assert_close(onward_sum(flat, every, Segments(rows, sizes), discount), expected[mask])
        return
    for rank in range(2):
        own = torch.arange(len(flat)) % 2 == rank

        def add_others(values: Tensor, own: Tensor = own) -> Tensor:
            return values + torch.cat([torch.where(own, 0.0, flat), torch.zeros(1, dtype=flat.dtype)])

        segments = Segments(rows[own], sizes, add_others, torch.arange(len(flat))[own], len(flat))
        torch.testing.assert_close(onward_sum(flat[own], every[own], segments, discount), expected[mask][own])


def brute_force_pass_at_k(rewards: list[float], k: int) -> list[float]:
    """Mean, over all sets with the response, of the set's standardised best reward."""
    sets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in members) for members in sets]
    mean = math.fsum(best) / len(best)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in best) / len(best))
    if std < 1e-9:
        return [0.0] * len(rewards)
    by_set = [(value - mean) / std for value in best]
    found = [[a for members, a in zip(sets, by_set, strict=True) if i in members] for i in range(len(rewards))]
    return [math.fsum(values) / len(values) for values in found]


@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0]) | st.integers(-3, 3).map(float), min_size=5, max_size=7),
    k=st.integers(2, 5),
)
def test_pass_at_k_matches_all_sets(rewards: list[float], k: int) -> None:
    actual = pass_at_k(torch.tensor([rewards], dtype=torch.float64), pass_k=k)[0]
    expected = torch.tensor(brute_force_pass_at_k(rewards, k), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("right", "samples", "k"), [(1, 8, 4), (3, 8, 2), (5, 16, 4)])
def test_pass_at_k_has_the_closed_forms_of_the_paper(right: int, samples: int, k: int) -> None:
    wrong = samples - right
    rewards = torch.tensor([[1.0] * right + [0.0] * wrong], dtype=torch.float64)
    mean = 1 - math.comb(wrong, k) / math.comb(samples, k)
    std = math.sqrt(mean * (1 - mean))
    good, bad = (1 - mean) / std, (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(samples - 1, k - 1)) / std
    expected = torch.tensor([[good] * right + [bad] * wrong], dtype=torch.float64)
    torch.testing.assert_close(pass_at_k(rewards, pass_k=k), expected, atol=1e-5, rtol=1e-5)


def test_maxrl_is_the_gradient_of_the_likelihood_of_success() -> None:
    """In expectation over all outcomes of a group it is that of the sum over k <= n of pass@k / k."""
    logit = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)
    samples, right = 4, logit.sigmoid()
    truncated = sum((1 - (1 - right) ** k) / k for k in range(1, samples + 1))
    (expected,) = torch.autograd.grad(truncated, logit, retain_graph=True)
    actual = torch.zeros((), dtype=torch.float64)
    for outcome in itertools.product((0.0, 1.0), repeat=samples):
        rewards = torch.tensor([outcome], dtype=torch.float64)
        chance = torch.where(rewards > 0, right, 1 - right).prod()
        scores = torch.where(rewards > 0, 1 - right, -right)  # d log p / d logit of each sample
        # The baseline takes the mean of the scores from every group with a success: it is added again.
        baseline = scores.mean() if any(outcome) else 0.0
        actual += (chance * ((maxrl(rewards) * scores).mean() + baseline)).detach()
    torch.testing.assert_close(actual, expected)


def test_opo_weighs_rewards_by_lengths() -> None:
    rewards = torch.tensor([[1.0, 0.0, 2.0], [1.0, math.nan, 3.0], [0.1, 0.1, 0.1]], dtype=torch.float64)
    lengths = torch.tensor([[10, 30, 60], [1, 50, 3], [1, 2, 7]])
    first, second = (10 + 120) / 100, (1 + 9) / 4
    expected = [[1 - first, -first, 2 - first], [1 - second, 0.0, 3 - second], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(opo(rewards, lengths), torch.tensor(expected, dtype=torch.float64))


def test_the_optimal_token_baseline_balances_what_it_weighs() -> None:
    """At each position the weighted advantages of a group add up to 0, which minimises their weighted squares."""
    draw = torch.Generator().manual_seed(4)
    rewards = torch.tensor([[1.0, 0.0, 0.5, math.nan], [0.2, 0.2, 0.2, 0.2]], dtype=torch.float64)
    lengths = torch.tensor([[4, 2, 3, 2], [3, 1, 0, 2]])
    sizes = torch.rand(int(lengths.sum()), generator=draw, dtype=torch.float64)
    penalty = 0.1 * torch.rand(int(lengths.sum()), generator=draw, dtype=torch.float64)
    for token_penalty in (None, penalty):
        advantages = otb(rewards, lengths, token_penalty, sizes)
        pieces = [values.split(lengths.flatten().tolist()) for values in (advantages, sizes, penalty)]
        for group, position in itertools.product(range(2), range(4)):
            members = [i for i in range(4) if lengths[group, i] > position and not rewards[group, i].isnan()]
            rows = [4 * group + i for i in members]
            energy = [float(pieces[1][row][: position + 1].sum()) for row in rows]
            later = [0.0 if token_penalty is None else float(pieces[2][row][position:].sum()) for row in rows]
            returns = [float(rewards[group, i]) - further for i, further in zip(members, later, strict=True)]
            weighted = sum(weight * value for weight, value in zip(energy, returns, strict=True))
            for row, value in zip(rows, returns, strict=True):
                expected = value - weighted / sum(energy)
                assert float(pieces[0][row][position]) == pytest.approx(expected, abs=1e-7)
    assert (otb(rewards, lengths, None, sizes)[11:] == 0).all()


def test_sizes_of_scores_are_those_of_the_softmax() -> None:
    """Log-probabilities at doubled logits give the sum of squared probabilities."""
    draw = torch.Generator().manual_seed(6)
    logits, targets = 2 * torch.randn(5, 11, generator=draw), torch.tensor([0, 3, 3, 10, 7])

    class Rank:
        settings = RankSettings(config=PolicyConfig(), shape=SHAPE, folder="", decay_steps=1, temperature=1 / 0.7)

        use_settings = PolicyRank.use_settings

        def compute_logprobs(self, batch: object, microbatches: object) -> Tensor:
            return (self.settings.logit_scale * logits).log_softmax(1)[torch.arange(5), targets]

    rank: Any = Rank()
    probabilities = (0.7 * logits).softmax(1)
    slopes = torch.nn.functional.one_hot(targets, 11) - probabilities  # d log p(target) / d logits
    actual = PolicyRank.compute_score_sizes(rank, None, None)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, slopes.square().sum(dim=1))
    assert rank.settings.temperature == 1 / 0.7


def test_each_task_has_a_running_baseline() -> None:
    """As SPIRAL's actors do it, game by game: the baseline moves first, then the advantage is taken."""
    baselines: dict[str, float] = {"solver": 0.5}
    rewards = torch.tensor([[1.0, 0.0], [1.0, math.nan], [-1.0, 1.0]])
    means = update_task_baselines(baselines, ["proposer", "solver", "proposer"], rewards, 0.9)
    expected, state = [], {"solver": 0.5}
    for task, reward in [("proposer", 1.0), ("proposer", 0.0), ("solver", 1.0), ("proposer", -1.0), ("proposer", 1.0)]:
        state[task] = 0.9 * state.get(task, 0.0) + 0.1 * reward
        expected.append(reward - state[task])
    advantages = rae(rewards, means)
    assert advantages[~rewards.isnan()].tolist() == pytest.approx(expected)
    assert advantages[1, 1] == 0
    assert baselines == pytest.approx(state)


def test_the_step_chooses_by_covariance_and_entropy() -> None:
    draw = torch.Generator().manual_seed(2)
    logprobs, advantages = -torch.rand(200, generator=draw), torch.randn(200, generator=draw)
    products = [
        (float(a) - float(logprobs.mean())) * (float(b) - float(advantages.mean()))
        for a, b in zip(logprobs, advantages, strict=True)
    ]
    highest = sorted(range(200), key=lambda i: -products[i])[:10]
    config = LossConfig(kl_cov_share=0.05, clip_cov_share=0.05, clip_cov_min=0.02, clip_cov_max=0.3)
    chosen = select_tokens("highest_covariance", config, logprobs, advantages).nonzero().flatten().tolist()
    assert sorted(chosen) == sorted(highest)
    band = select_tokens("covariance_band", config, logprobs, advantages).nonzero().flatten().tolist()
    assert len(band) == 10
    assert all(0.02 < products[i] < 0.3 for i in band)
    config = LossConfig(top_entropy_quantile=0.3)
    entropy = torch.rand(200, generator=draw)
    chosen = select_tokens("highest_entropy", config, entropy, advantages).nonzero().flatten().tolist()
    assert sorted(chosen) == sorted(sorted(range(200), key=lambda i: -float(entropy[i]))[:60])


def test_only_tokens_in_the_loss_are_chosen() -> None:
    config = LossConfig(objective="kl_cov", kl_cov_share=1.0)
    figures = torch.tensor([-1.0, -math.inf, -2.0, -3.0])
    mask = torch.tensor([True, True, True, False])
    assert mark_selected(config, figures, torch.ones(4), mask).tolist() == [1, 0, 1, 0]
    assert mark_selected(config, figures, torch.ones(4), torch.zeros(4, dtype=torch.bool)).tolist() == [0, 0, 0, 0]


def test_factors_are_multiplied() -> None:
    """Without gradients of the policy a factor is the ratio of losses with and without it, token by token."""
    curr, tokens = random_batch(34)
    single = ["off_policy_mask", "divergence_mask", "seq_tis"]
    plain = find_gradient(CONFIGS["plain"], curr, tokens)
    limits = {"off_policy_mask_threshold": 0.05, "divergence_mask_threshold": 0.15}
    together = replace(
        CONFIGS["plain"],
        corrections=["off-policy-mask", "divergence-mask", "seq-tis"],
        truncated_importance_sampling_ratio=1.2,
        **limits,
    )
    product = math.prod(find_gradient(CONFIGS[name], curr, tokens) / plain for name in single)
    is_used = plain != 0
    actual = find_gradient(together, curr, tokens) / plain
    torch.testing.assert_close(actual[is_used], product[is_used])
    assert (actual[is_used] == 0).any()


@pytest.mark.parametrize("name", [name for name, entry in CORRECTIONS.items() if entry.is_weight])
def test_a_weight_in_the_list_is_that_of_the_single_key(name: str) -> None:
    curr, tokens = random_batch(35)
    limits = {key: LIMITS[key] for key in CORRECTIONS[name].reads}
    single = LossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_type=name, **limits)
    listed = LossConfig(corrections=[name], **limits)
    losses = [ClippedPGLossFn(config)(curr, tokens, counts_of(tokens)) for config in (single, listed)]
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=0)
