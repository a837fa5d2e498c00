"""Checks of the loss: surrogate, average, KL and importance correction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.rules import Rule


def check_loss(config: Config) -> Iterator[Rule]:
    """Check keys of the loss against each other."""
    yield from _check_surrogate(config)
    yield from _check_kl(config)
    yield from _check_correction(config.loss_fn)


def _check_surrogate(config: Config) -> Iterator[Rule]:
    loss = config.loss_fn
    chosen = [f"loss_fn.{name}" for name in ("use_cispo", "use_sapo", "disable_ppo_ratio") if getattr(loss, name)]
    first = chosen[0] if chosen else ""
    yield len(chosen) > 1, f"{first}=", f"excludes {' and '.join(chosen[1:])}: each is a surrogate of its own"
    text = f"bounds the clipped surrogate, which {first} replaces; use null"
    yield chosen and loss.ratio_clip_c is not None, "loss_fn.ratio_clip_c=", text
    text = "excludes loss_fn.disable_ppo_ratio: there is no ratio left to be forced to 1"
    yield loss.force_on_policy_ratio and loss.disable_ppo_ratio, "loss_fn.force_on_policy_ratio=", text
    steps = config.optimizer_steps_per_step
    text = (
        f"is correct for one optimizer step per sample; this configuration makes {steps}. "
        "Set PASSES=1 and one minibatch"
    )
    yield loss.force_on_policy_ratio and steps > 1, "loss_fn.force_on_policy_ratio=", text
    is_sequence_level, subject = loss.sequence_level_importance_ratios, "loss_fn.sequence_level_importance_ratios="
    reason = "has no ratio" if loss.disable_ppo_ratio else "weighs every token by its own ratio"
    yield chosen and is_sequence_level, subject, f"excludes {first}, which {reason}"
    text = "needs loss_fn.token_level_loss=false: an average over tokens would weigh a response by its length"
    yield is_sequence_level and loss.token_level_loss, subject, text
    has_normalizer = loss.constant_normalizer_tokens is not None
    text = "excludes loss_fn.token_level_loss=false: both say what a response's tokens are divided by"
    yield has_normalizer and not loss.token_level_loss, "loss_fn.constant_normalizer_tokens=", text


def _check_kl(config: Config) -> Iterator[Rule]:
    loss = config.loss_fn
    is_corrected = loss.use_on_policy_kl_approximation or loss.kl_score_function_gradient
    text = (
        "has an expected gradient of 0 in the loss; use k2 or k3, loss_fn.use_on_policy_kl_approximation, or "
        "loss_fn.use_kl_in_reward"
    )
    has_no_gradient = loss.reference_policy_kl_type == "k1" and loss.kl_in_loss > 0 and not is_corrected
    yield has_no_gradient, "loss_fn.reference_policy_kl_type=", text
    text = "subtracts nothing while loss_fn.reference_policy_kl_penalty is 0"
    yield loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0, "loss_fn.use_kl_in_reward=", text
    text = "weighs the KL of the loss, and loss_fn.use_kl_in_reward leaves none there"
    is_weighted = loss.use_on_policy_kl_approximation
    yield is_weighted and loss.use_kl_in_reward, "loss_fn.use_on_policy_kl_approximation=", text
    uses_score, subject = loss.kl_score_function_gradient, "loss_fn.kl_score_function_gradient="
    text = "excludes loss_fn.use_on_policy_kl_approximation, whose weight has a gradient for the same purpose"
    yield uses_score and is_weighted, subject, text
    text = "is about the KL in the loss, and loss_fn.use_kl_in_reward leaves none there; its gradient is already right"
    yield uses_score and loss.use_kl_in_reward, subject, text
    text = "needs an unbiased estimate: loss_fn.reference_policy_kl_type=k1 or k3"
    yield uses_score and loss.reference_policy_kl_type == "k2", subject, text
    text = "sums over the tokens after each one, which context-parallel ranks share; use policy.parallel.context=1"
    yield uses_score and config.policy.parallel.context > 1, subject, text


def _check_correction(loss: LossConfig) -> Iterator[Rule]:
    kind, low = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio_min
    high, key = loss.truncated_importance_sampling_ratio, "loss_fn.truncated_importance_sampling"
    if kind is None:
        text = f"needs {key}_type: tis, icepop or seq-mask-tis"
        yield high is not None, f"{key}_ratio=", text
        yield low is not None, f"{key}_ratio_min=", text
        return
    text = "needs loss_fn.use_importance_sampling_correction=true, whose weights it limits"
    yield not loss.use_importance_sampling_correction, f"{key}_type=", text
    yield high is None, f"{key}_type=", f"needs {key}_ratio, the upper limit"
    is_tis = kind == "tis"
    text = "tis has no lower limit; use null, or icepop or seq-mask-tis"
    yield is_tis and low is not None, f"{key}_ratio_min=", text
    yield not is_tis and low is None, f"{key}_type=", f"needs {key}_ratio_min, the lower limit"
    text = "must be below 1, the weight of a token that both frameworks agree about, which is to stay in the loss"
    yield not is_tis and low is not None and low >= 1, f"{key}_ratio_min=", text
    bound = "at least" if is_tis else "above"
    text = f"must be {bound} 1, the weight of a token that both frameworks agree about, which is to stay as it is"
    yield high is not None and (high < 1 or (not is_tis and high == 1)), f"{key}_ratio=", text
