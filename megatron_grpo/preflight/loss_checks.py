"""Rules of the loss (surrogate, average, KL, importance correction) and of asynchronous training."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.rules import Rule


def check_loss(config: Config) -> Iterator[Rule]:
    """Keys of the loss that exclude each other or lack what they need."""
    yield from _surrogates(config)
    yield from _kl(config)
    yield from _correction(config.loss_fn)


def _surrogates(config: Config) -> Iterator[Rule]:
    """Rules of the surrogate, its ratios and the average of the loss."""
    loss = config.loss_fn
    chosen = [f"loss_fn.{name}" for name in ("use_cispo", "use_sapo", "disable_ppo_ratio") if getattr(loss, name)]
    first = chosen[0] if chosen else ""
    yield len(chosen) > 1, f"{first}=", f"excludes {' and '.join(chosen[1:])}: each is a surrogate of its own"
    text = f"bounds the clipped surrogate, which {first} replaces; use null"
    yield chosen and loss.ratio_clip_c is not None, "loss_fn.ratio_clip_c=", text
    text = "excludes loss_fn.disable_ppo_ratio: there is no ratio left to be forced to 1"
    yield loss.force_on_policy_ratio and loss.disable_ppo_ratio, "loss_fn.force_on_policy_ratio=", text
    steps = config.optimizer_steps_per_step
    text = f"holds for the first optimizer step on a sample only, and there are {steps}; use PASSES=1 and one minibatch"
    yield loss.force_on_policy_ratio and steps > 1, "loss_fn.force_on_policy_ratio=", text
    sequence, subject = loss.sequence_level_importance_ratios, "loss_fn.sequence_level_importance_ratios="
    why = "has no ratio" if loss.disable_ppo_ratio else "weighs every token by its own ratio"
    yield chosen and sequence, subject, f"excludes {first}, which {why}"
    text = "needs loss_fn.token_level_loss=false: an average over tokens would weigh a response by its length"
    yield sequence and loss.token_level_loss, subject, text
    normalizes = loss.constant_normalizer_tokens is not None
    text = "excludes loss_fn.token_level_loss=false: both say what a response's tokens are divided by"
    yield normalizes and not loss.token_level_loss, "loss_fn.constant_normalizer_tokens=", text


def _kl(config: Config) -> Iterator[Rule]:
    """Rules of the KL penalty against the reference policy."""
    loss = config.loss_fn
    corrected = loss.use_on_policy_kl_approximation or loss.kl_score_function_gradient
    text = (
        "has an expected gradient of 0 in the loss; use k2 or k3, loss_fn.use_on_policy_kl_approximation, or "
        "loss_fn.use_kl_in_reward"
    )
    biased = loss.reference_policy_kl_type == "k1" and loss.kl_in_loss > 0 and not corrected
    yield biased, "loss_fn.reference_policy_kl_type=", text
    text = "subtracts nothing while loss_fn.reference_policy_kl_penalty is 0"
    yield loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0, "loss_fn.use_kl_in_reward=", text
    text = "weighs the KL of the loss, and loss_fn.use_kl_in_reward leaves none there"
    weighs = loss.use_on_policy_kl_approximation
    yield weighs and loss.use_kl_in_reward, "loss_fn.use_on_policy_kl_approximation=", text
    score, subject = loss.kl_score_function_gradient, "loss_fn.kl_score_function_gradient="
    text = "excludes loss_fn.use_on_policy_kl_approximation, whose weight has a gradient for the same purpose"
    yield score and weighs, subject, text
    text = "is about the KL in the loss, and loss_fn.use_kl_in_reward leaves none there; its gradient is already right"
    yield score and loss.use_kl_in_reward, subject, text
    text = "needs an unbiased estimate: loss_fn.reference_policy_kl_type=k1 or k3"
    yield score and loss.reference_policy_kl_type == "k2", subject, text
    text = "sums over the tokens after each one, which context-parallel ranks share; use policy.parallel.context=1"
    yield score and config.policy.parallel.context > 1, subject, text


def _correction(loss: LossConfig) -> Iterator[Rule]:
    """Rules of the importance correction and its limits."""
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


def check_async(config: Config) -> Iterator[Rule]:
    """Settings that cannot be combined with training on samples of earlier weights, or with oversampling."""
    options = config.training_loop.async_grpo
    text = (
        "trains on samples of earlier weights without an importance correction; give "
        "loss_fn.use_importance_sampling_correction=true, best with loss_fn.truncated_importance_sampling_type=tis "
        "and loss_fn.truncated_importance_sampling_ratio=2"
    )
    corrects = config.loss_fn.use_importance_sampling_correction
    yield options.can_sample_ahead and not corrects, "LOOP.async_grpo.enabled=", text
    text = (
        "does not go with policy.moe.replay_routing=true: when the weights change under a response, the engine "
        "records the experts of its earlier tokens under the new weights"
    )
    yield options.can_sample_ahead and config.policy.moe.replay_routing, "LOOP.async_grpo.enabled=", text
    factor, age = options.oversampling_factor, options.max_trajectory_age_steps
    prompts = config.prompts_per_generation_batch
    if not options.enabled or factor is None:
        return
    subject = "LOOP.async_grpo.oversampling_factor="
    text = "gives prompts back to the data, which a stream does not take; use data.streaming=false"
    yield config.data.streaming, subject, text
    below = f"give a factor below {age + 1}, for instance {(age + 2) / 2:g}, or " if age else "give "
    text = (
        f"leaves no prompt time beyond its turn: with LOOP.async_grpo.max_trajectory_age_steps={age} a step has to "
        f"take the oldest ones; {below}LOOP.async_grpo.max_trajectory_age_steps={int(factor)} or more"
    )
    yield factor >= age + 1, subject, text
    text = f"adds no whole prompt to the {prompts} of a step; give at least {1 + 1 / prompts:g}"
    yield int(factor * prompts) == prompts, subject, text


def check_async_cautions(config: Config) -> Iterator[Rule]:
    """Settings of asynchronous training that are allowed and may not be intended."""
    ahead = config.training_loop.async_grpo.can_sample_ahead
    text = (
        "puts no limit on the importance weights of samples from earlier versions of the policy; "
        "loss_fn.truncated_importance_sampling_type=tis and loss_fn.truncated_importance_sampling_ratio=2 give one"
    )
    yield ahead and config.loss_fn.truncated_importance_sampling_type is None, "LOOP.async_grpo.enabled=", text
    text = "also leaves out responses from earlier versions of the policy, on which the frameworks need not disagree"
    yield (
        ahead and config.training_loop.seq_logprob_error_threshold is not None,
        "LOOP.seq_logprob_error_threshold=",
        text,
    )
