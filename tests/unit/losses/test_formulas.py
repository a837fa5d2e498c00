"""Objectives, corrections and advantages by name: their table, their switches, and trials of users' functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.formulas import ADVANTAGES, CORRECTIONS, OBJECTIVES
from megatron_grpo.config.function_options import list_parameters
from megatron_grpo.config.loss_schema import AdvantageEstimatorConfig
from megatron_grpo.config.schema import GRPOConfig, LossConfig
from megatron_grpo.losses import advantages, corrections, objectives
from megatron_grpo.losses.formula_trials import find_advantages_problem, find_objective_problem
from megatron_grpo.losses.policy_loss import ClippedPGLossFn, make_objective
from tests.support.loss_oracle import VARIANTS, counts_of, random_batch

HERE = __name__
OWN = ("nowhere",)
"""Folders of a user: with some, what a function returns is checked."""


@pytest.mark.parametrize(
    ("module", "entries", "inputs"),
    [
        (objectives, {name: (name, entry.reads) for name, entry in OBJECTIVES.items()}, objectives.INPUTS),
        (corrections, {name: (entry.function, entry.reads) for name, entry in CORRECTIONS.items()}, corrections.INPUTS),
        (advantages, {name: (name, entry.reads) for name, entry in ADVANTAGES.items()}, advantages.INPUTS),
    ],
    ids=["objectives", "corrections", "advantages"],
)
def test_the_table_says_what_the_functions_read(
    module: ModuleType, entries: dict[str, tuple[str, frozenset[str]]], inputs: Any
) -> None:
    for name, (function, reads) in entries.items():
        assert list_parameters(getattr(module, function)).keys() - {*inputs} == reads, name


@pytest.mark.parametrize("name", [name for name, entry in OBJECTIVES.items() if entry.switch])
def test_a_switch_and_the_name_of_its_objective_are_one_loss(name: str) -> None:
    shared = {"token_level_loss": False, "ratio_clip_max": 0.3, "reference_policy_kl_penalty": 0.1}
    results = []
    for choice in ({OBJECTIVES[name].switch: True}, {"objective": name}):
        curr, tokens = random_batch(1)
        curr.requires_grad_()
        loss, metrics = ClippedPGLossFn(LossConfig(**shared, **choice))(curr, tokens, counts_of(tokens))
        loss.backward()
        assert curr.grad is not None
        results.append([loss.detach(), curr.grad, *(metrics[key].detach() for key in sorted(metrics))])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize("force", ["force_on_policy_ratio", "objective"])
def test_on_policy_is_minus_the_advantage_with_the_gradient_of_reinforce(force: str) -> None:
    curr, tokens = random_batch(1)
    config = LossConfig(reference_policy_kl_penalty=0.0, **{force: "on_policy" if force == "objective" else True})
    curr.requires_grad_()
    loss, _ = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
    loss.backward()
    mean = -(tokens.advantages * tokens.loss_mask).sum() / tokens.loss_mask.sum()
    torch.testing.assert_close(loss.detach(), mean)
    torch.testing.assert_close(curr.grad, -tokens.advantages * tokens.loss_mask / tokens.loss_mask.sum())


@pytest.mark.parametrize("name", VARIANTS["variants"])
def test_every_built_in_objective_passes_the_trials(name: str) -> None:
    assert find_objective_problem(make_objective(LossConfig(**VARIANTS["variants"][name]), OWN)) is None


def dppo(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, *, high: float = 0.2, low: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    shift = logprobs.detach().exp() - sampling_logprobs.exp()
    is_masked = ((advantages > 0) & (shift > high)) | ((advantages < 0) & (-shift > low))
    ratio = (logprobs - sampling_logprobs).exp()
    return torch.where(is_masked, 0.0, -advantages * ratio), {"masked_fraction": is_masked}


def response_ratio(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, responses: Any) -> Tensor:
    return -(responses.mean(log_ratio) + logprobs - logprobs.detach()).exp() * advantages


def average(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -(log_ratio.exp() * advantages * mask).sum() / mask.sum()


def of_padding(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -log_ratio.exp() * (advantages - advantages.mean())


def of_microbatch(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -log_ratio.exp() * advantages * (1 + advantages[mask].abs().mean())


def of_other_responses(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -log_ratio.exp() * advantages + log_ratio * log_ratio.detach().cumsum(-1)


def of_own_tokens(log_ratio: Tensor, advantages: Tensor, responses: Any) -> Tensor:
    sums = torch.zeros_like(responses.segments.sizes).index_add(0, responses.segments.sequence_index, log_ratio)
    return -log_ratio.exp() * advantages - log_ratio * sums.detach()[responses.segments.sequence_index]


def without_gradient(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -log_ratio.detach() * advantages


def with_gradient_of_zero(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -log_ratio.detach() * advantages + 0 * log_ratio


def not_a_number(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * log_ratio / (log_ratio - log_ratio.detach())


def maximised(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return log_ratio.exp() * advantages


def of_statistic(log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -log_ratio.exp() * advantages, {"largest": log_ratio.amax()}


def raising(log_ratio: Tensor) -> Tensor:
    return log_ratio[log_ratio.argmax().item() + 1000]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (dppo, None),
        (response_ratio, None),
        (average, "returned a loss of shape [], and its tokens have shape [25]"),
        (of_padding, "depends on padding"),
        (of_microbatch, "depends on its microbatch"),
        (of_other_responses, "depends on its microbatch"),
        (of_own_tokens, "AttributeError"),
        (without_gradient, "returned a loss without gradient"),
        (with_gradient_of_zero, "gradient is 0 at every token"),
        (not_a_number, "not finite"),
        (maximised, "makes tokens of positive advantage less likely"),
        (of_statistic, "the statistic largest of shape []"),
        (raising, "raised IndexError"),
    ],
)
def test_a_wrong_objective_is_told_what_is_wrong(function: Any, reason: str | None) -> None:
    found = find_objective_problem(make_objective(LossConfig(objective=f"{HERE}.{function.__name__}"), OWN))
    assert found is None if reason is None else reason in str(found)


def own_sum(log_ratio: Tensor, advantages: Tensor, responses: Any) -> Tensor:
    if responses.segments is None:
        sums = (log_ratio * responses.mask).sum(dim=1, keepdim=True)
    else:
        index = responses.segments.sequence_index
        sums = torch.zeros_like(responses.segments.sizes).index_add(0, index, log_ratio)[index]
    return -log_ratio.exp() * advantages - log_ratio * sums.detach()


def test_a_sum_without_the_other_ranks_is_named() -> None:
    reason = find_objective_problem(make_objective(LossConfig(objective=f"{HERE}.own_sum"), OWN))
    assert "depends on context parallelism" in str(reason)


def maxrl(rewards: Tensor) -> Tensor:
    mean = rewards.nanmean(dim=1, keepdim=True)
    return torch.where(mean > 0, (rewards - mean) / mean, 0.0)


def shorter(rewards: Tensor, lengths: Tensor, *, weight: float = 0.1) -> Tensor:
    return rewards - rewards.nanmean(dim=1, keepdim=True) - weight * lengths / lengths.amax()


def of_group(rewards: Tensor) -> Tensor:
    return rewards.std(dim=1)


def standardised(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)


def careless_of_missing(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (maxrl, None),
        (shorter, None),
        (of_group, "returned shape [4]; rewards are [groups, samples], [4, 3]"),
        (standardised, "returned [nan, nan, nan] for the rewards [1.0, 1.0, 1.0]"),
        (careless_of_missing, "for the rewards [nan, "),
    ],
)
def test_wrong_advantages_are_told_what_is_wrong(function: Any, reason: str | None) -> None:
    settings = AdvantageEstimatorConfig(name=f"{HERE}.{function.__name__}")
    found = find_advantages_problem(advantages.make_estimator(GRPOConfig(adv_estimator=settings), OWN), 3)
    assert found is None if reason is None else reason in str(found)


def test_options_are_converted_by_their_annotations() -> None:
    config = LossConfig(objective=f"{HERE}.dppo", objective_options={"high": "0.5"})
    assert make_objective(config, OWN).arguments == {"high": 0.5}
    curr, tokens = random_batch(1)
    _, metrics = ClippedPGLossFn(config, OWN)(curr.requires_grad_(), tokens, counts_of(tokens))
    assert 0 < metrics["masked_fraction"] < 1
    for options, reason in (
        ({"hihg": 1}, "hihg=1 is not an option of dppo; did you mean high?"),
        ({"low": "deep"}, "low=deep does not fit dppo: Input should be a valid number"),
    ):
        with pytest.raises(RunError, match=r"option of dppo|does not fit") as error:
            make_objective(LossConfig(objective=f"{HERE}.dppo", objective_options=options), OWN)
        assert reason in str(error.value)


def test_a_parameter_with_the_name_of_a_key_has_its_value() -> None:
    config = LossConfig(objective="megatron_grpo.losses.objectives.clipped", ratio_clip_max=0.7)
    assert make_objective(config, OWN).arguments == {
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.7,
        "ratio_clip_c": None,
    }


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (f"{HERE}.nothing", "cannot be imported: AttributeError"),
        ("no_such_losses.dppo", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}.HERE", "is str, which cannot be called"),
    ],
)
def test_a_function_that_is_not_there_is_named(path: str, reason: str) -> None:
    with pytest.raises(RunError) as error:
        make_objective(LossConfig(objective=path), OWN)
    assert path in str(error.value)
    assert reason in str(error.value)


def with_missing_token(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, responses: objectives.Responses
) -> objectives.TokenLoss:
    """Of log(1 - p), infinite outside the mask, where log-probabilities are 0."""
    others = torch.log1p(-logprobs.exp())
    return -log_ratio.exp() * advantages + others - responses.mean(others), {"others": others}


def with_guarded_token(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, responses: objectives.Responses
) -> objectives.TokenLoss:
    others = torch.log1p(-torch.where(mask, logprobs, -1.0).exp())
    mean = (others * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return -log_ratio.exp() * advantages + others - mean.detach(), {"others": others}


@pytest.mark.parametrize("correction", [False, True])
def test_what_a_function_returns_outside_the_mask_counts_nowhere(correction: bool) -> None:
    results = []
    for name in ("with_missing_token", "with_guarded_token"):
        curr, tokens = random_batch(3)
        curr = curr.clamp(max=-0.05).requires_grad_()
        config = LossConfig(objective=f"{HERE}.{name}", use_importance_sampling_correction=correction)
        loss, metrics = ClippedPGLossFn(config, OWN)(curr, tokens, counts_of(tokens))
        loss.backward()
        assert curr.grad is not None
        results.append([loss.detach(), curr.grad, metrics["others"].detach()])
    missing = LossConfig(objective=f"{HERE}.with_missing_token")
    assert find_objective_problem(make_objective(missing, OWN)) is None
    for actual, expected in zip(*results, strict=True):
        assert expected.isfinite().all()
        assert expected.any()
        torch.testing.assert_close(actual, expected)
