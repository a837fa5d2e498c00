"""Checks of the loss's options beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_grpo.config.formulas import CORRECTIONS, LOWER, WEIGHTS
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.objective_checks import check_objective
from megatron_grpo.preflight.rules import Rule


def check_loss(config: Config) -> Iterator[Rule]:
    """Check options of the loss that exclude or need each other."""
    yield from check_objective(config)
    loss, text = (
        config.loss_fn,
        "excludes loss_fn.token_level_loss=false: both say what a response's tokens are divided by",
    )
    is_divided_twice = loss.constant_normalizer_tokens is not None and not loss.token_level_loss
    yield is_divided_twice, "loss_fn.constant_normalizer_tokens=", text
    yield from _check_kl(config)
    yield from _check_corrections(config)


def _check_kl(config: Config) -> Iterator[Rule]:
    loss = config.loss_fn
    text = "subtracts nothing while loss_fn.reference_policy_kl_penalty is 0"
    yield loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0, "loss_fn.use_kl_in_reward=", text
    is_weighed, key = loss.use_on_policy_kl_approximation, "loss_fn.kl_score_function_gradient="
    text = "weighs the KL of the loss, and loss_fn.use_kl_in_reward leaves none there"
    yield is_weighed and loss.use_kl_in_reward, "loss_fn.use_on_policy_kl_approximation=", text
    if loss.kl_score_function_gradient:
        text = "excludes loss_fn.use_on_policy_kl_approximation, whose weight has a gradient for the same purpose"
        yield is_weighed, key, text
        text = "is about the KL in the loss, and loss_fn.use_kl_in_reward leaves none there;"
        text += " its gradient is already right"
        yield loss.use_kl_in_reward, key, text
        text = "needs an unbiased estimate: loss_fn.reference_policy_kl_type=k1 or k3"
        yield loss.reference_policy_kl_type == "k2", key, text
    text = "has an expected gradient of 0 in the loss; use k2 or k3, loss_fn.use_on_policy_kl_approximation,"
    text += " or loss_fn.use_kl_in_reward"
    has_gradient = is_weighed or loss.kl_score_function_gradient or loss.reference_policy_kl_type != "k1"
    yield loss.kl_in_loss > 0 and not has_gradient, "loss_fn.reference_policy_kl_type=", text


def _check_corrections(config: Config) -> Iterator[Rule]:
    loss = config.loss_fn
    kind, upper = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio
    lower, weight = loss.truncated_importance_sampling_ratio_min, loss.chosen_weight or kind
    yield from _check_combination(config)
    if weight is None:
        text = f"needs loss_fn.truncated_importance_sampling_type: {', '.join(WEIGHTS)}"
        yield upper is not None, "loss_fn.truncated_importance_sampling_ratio=", text
        yield lower is not None, "loss_fn.truncated_importance_sampling_ratio_min=", text
        return
    text = "needs loss_fn.use_importance_sampling_correction=true, whose weights it limits"
    is_unused = kind is not None and not loss.use_importance_sampling_correction
    yield is_unused, "loss_fn.truncated_importance_sampling_type=", text
    subject = "loss_fn.corrections=" if kind is None else "loss_fn.truncated_importance_sampling_type="
    text = "needs loss_fn.truncated_importance_sampling_ratio, the upper limit"
    yield upper is None, subject, text
    # Tokens on which both frameworks agree have the weight 1, which no limit may change.
    if LOWER not in CORRECTIONS[weight].reads:
        text = f"{weight} has no lower limit; use null, or icepop or seq-mask-tis"
        yield lower is not None, "loss_fn.truncated_importance_sampling_ratio_min=", text
        text = "must be at least 1, the weight of a token that both frameworks agree about, which is to stay as it is"
        yield upper is not None and upper < 1, "loss_fn.truncated_importance_sampling_ratio=", text
        return
    text = "needs loss_fn.truncated_importance_sampling_ratio_min, the lower limit"
    yield lower is None, subject, text
    text = "must be below 1, the weight of a token that both frameworks agree about, which is to stay in the loss"
    yield lower is not None and lower >= 1, "loss_fn.truncated_importance_sampling_ratio_min=", text
    text = "must be above 1, the weight of a token that both frameworks agree about, which is to stay as it is"
    yield upper is not None and upper <= 1, "loss_fn.truncated_importance_sampling_ratio=", text


def _check_combination(config: Config) -> Iterator[Rule]:
    """Check which factors of the objective go together, and with which objective."""
    loss, key = config.loss_fn, "loss_fn.corrections="
    weights = [name for name in loss.corrections if name in WEIGHTS]
    repeated = [name for name, count in Counter(loss.corrections).items() if count > 1]
    yield repeated, key, f"has {', '.join(repeated)} twice; name each factor once"
    text = f"has the weights {' and '.join(dict.fromkeys(weights))}, and a token has one weight; leave one of them out"
    yield len({*weights}) > 1, key, text
    text = "excludes loss_fn.use_importance_sampling_correction=true, which weighs tokens too; leave one of them out"
    yield weights and loss.use_importance_sampling_correction, key, text
    name = loss.chosen_objective
    text = f"weighs tokens against the engine, and the ratio of {name} is to the engine's policy already; use false"
    compares_engine = loss.objective_entry is not None and loss.objective_entry.compares_engine
    is_weighted = compares_engine and loss.use_importance_sampling_correction
    yield is_weighted, "loss_fn.use_importance_sampling_correction=", text
    text = (
        f"has the weight {' '.join(weights[:1])}, and the ratio of {name} is to the engine's policy already; leave it"
    )
    text += " out"
    yield compares_engine and weights, key, text
    of_objective = loss.objective_entry is not None and loss.objective_entry.selection
    text = f"chooses tokens of the step by entropy, and {name} by covariance; a run has one such rule"
    yield of_objective and "high-entropy" in loss.corrections, key, text
    is_empty = loss.objective_entry is not None and loss.clip_cov_min >= loss.clip_cov_max
    text = f"must be below loss_fn.clip_cov_max={loss.clip_cov_max:g}"
    yield name == "clip_cov" and is_empty, "loss_fn.clip_cov_min=", text
    text = "has seq-mask beside seq-mask-tis, which masks responses by the same mean; leave one of them out"
    yield {"seq-mask", "seq-mask-tis"} <= {*loss.chosen_corrections}, key, text
