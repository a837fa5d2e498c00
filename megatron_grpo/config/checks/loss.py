"""Checks of the loss (surrogate, average, KL, importance correction) and of asynchronous training."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config

_SURROGATES = ("use_cispo", "use_sapo", "disable_ppo_ratio")
"""Keys that replace the clipped surrogate."""


def loss_problems(config: Config) -> Iterator[Problem]:
    """Keys of the loss that exclude each other or lack what they need."""
    yield from _surrogates(config.loss_fn)
    yield from _averages(config.loss_fn)
    yield from _kl(config.loss_fn)
    yield from _correction(config.loss_fn)
    yield from _score_function(config)
    if config.loss_fn.force_on_policy_ratio and config.optimizer_steps_per_step > 1:
        text = (
            f"holds for the first optimizer step on a sample only, and there are {config.optimizer_steps_per_step}; "
            f"use {config.passes_key}=1 and one minibatch"
        )
        yield Problem("loss_fn.force_on_policy_ratio=True", text)


def _surrogates(loss: LossConfig) -> Iterator[Problem]:
    chosen = [name for name in _SURROGATES if getattr(loss, name)]
    if len(chosen) > 1:
        text = f"excludes {' and '.join(f'loss_fn.{name}' for name in chosen[1:])}: each is a surrogate of its own"
        yield Problem(f"loss_fn.{chosen[0]}=True", text)
    if chosen and loss.ratio_clip_c is not None:
        text = f"bounds the clipped surrogate, which loss_fn.{chosen[0]} replaces; use null"
        yield Problem(f"loss_fn.ratio_clip_c={loss.ratio_clip_c:g}", text)
    if loss.force_on_policy_ratio and loss.disable_ppo_ratio:
        text = "excludes loss_fn.disable_ppo_ratio: there is no ratio left to be forced to 1"
        yield Problem("loss_fn.force_on_policy_ratio=True", text)
    if chosen and loss.sequence_level_importance_ratios:
        why = "has no ratio" if loss.disable_ppo_ratio else "weighs every token by its own ratio"
        text = f"excludes loss_fn.{chosen[0]}, which {why}"
        yield Problem("loss_fn.sequence_level_importance_ratios=True", text)


def _averages(loss: LossConfig) -> Iterator[Problem]:
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        text = "needs loss_fn.token_level_loss=false: an average over tokens would weigh a response by its length"
        yield Problem("loss_fn.sequence_level_importance_ratios=True", text)
    if loss.constant_normalizer_tokens is not None and not loss.token_level_loss:
        text = "excludes loss_fn.token_level_loss=false: both say what a response's tokens are divided by"
        yield Problem(f"loss_fn.constant_normalizer_tokens={loss.constant_normalizer_tokens}", text)


def _kl(loss: LossConfig) -> Iterator[Problem]:
    corrected = loss.use_on_policy_kl_approximation or loss.kl_score_function_gradient
    unweighted = loss.kl_in_loss > 0 and not corrected
    if loss.reference_policy_kl_type == "k1" and unweighted:
        text = (
            "has an expected gradient of 0 in the loss; use k2 or k3, loss_fn.use_on_policy_kl_approximation, or "
            "loss_fn.use_kl_in_reward"
        )
        yield Problem("loss_fn.reference_policy_kl_type=k1", text)
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        text = "subtracts nothing while loss_fn.reference_policy_kl_penalty is 0"
        yield Problem("loss_fn.use_kl_in_reward=True", text)
    if loss.use_kl_in_reward and loss.use_on_policy_kl_approximation:
        text = "weighs the KL of the loss, and loss_fn.use_kl_in_reward leaves none there"
        yield Problem("loss_fn.use_on_policy_kl_approximation=True", text)


def _score_function(config: Config) -> Iterator[Problem]:
    """Settings that the score-function gradient of the KL excludes or needs."""
    loss, subject = config.loss_fn, "loss_fn.kl_score_function_gradient=True"
    if not loss.kl_score_function_gradient:
        return
    if loss.use_on_policy_kl_approximation:
        text = "excludes loss_fn.use_on_policy_kl_approximation, whose weight has a gradient for the same purpose"
        yield Problem(subject, text)
    if loss.use_kl_in_reward:
        text = "is about the KL in the loss, and loss_fn.use_kl_in_reward leaves none there; its gradient is right"
        yield Problem(subject, text)
    if loss.reference_policy_kl_type == "k2":
        text = "needs an estimate without bias: loss_fn.reference_policy_kl_type=k1 or k3"
        yield Problem(subject, text)
    if config.policy.parallel.context > 1:
        text = "sums over the tokens after each one, which context-parallel ranks share; use policy.parallel.context=1"
        yield Problem(subject, text)


def _correction(loss: LossConfig) -> Iterator[Problem]:
    kind, low = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio_min
    high = loss.truncated_importance_sampling_ratio
    prefix = "loss_fn.truncated_importance_sampling"
    if kind is None:
        for name, value in (("ratio", high), ("ratio_min", low)):
            if value is not None:
                yield Problem(f"{prefix}_{name}={value:g}", f"needs {prefix}_type: tis, icepop or seq-mask-tis")
        return
    if not loss.use_importance_sampling_correction:
        text = "needs loss_fn.use_importance_sampling_correction=true, whose weights it limits"
        yield Problem(f"{prefix}_type={kind}", text)
    if high is None:
        yield Problem(f"{prefix}_type={kind}", f"needs {prefix}_ratio, the upper limit")
    if kind == "tis" and low is not None:
        yield Problem(f"{prefix}_ratio_min={low:g}", "tis has no lower limit; use null, or icepop or seq-mask-tis")
    if kind != "tis" and low is None:
        yield Problem(f"{prefix}_type={kind}", f"needs {prefix}_ratio_min, the lower limit")
    if kind != "tis" and low is not None and low >= 1:
        text = "must be below 1, the weight of a token that both frameworks agree about, which is to stay in the loss"
        yield Problem(f"{prefix}_ratio_min={low:g}", text)
    if high is not None and (high < 1 or (kind != "tis" and high == 1)):
        bound = "at least" if kind == "tis" else "above"
        text = f"must be {bound} 1, the weight of a token that both frameworks agree about, which is to stay as it is"
        yield Problem(f"{prefix}_ratio={high:g}", text)


def async_problems(config: Config) -> Iterator[Problem]:
    """Settings that exclude training on samples of earlier weights."""
    options = config.loop.async_grpo
    if not options.enabled or options.max_trajectory_age_steps == 0:
        return
    subject = f"{config.algorithm}.async_grpo.enabled=True"
    if not config.loss_fn.use_importance_sampling_correction:
        text = (
            "trains on samples of earlier weights, and nothing weighs them; give "
            "loss_fn.use_importance_sampling_correction=true, best with loss_fn.truncated_importance_sampling_type=tis "
            "and loss_fn.truncated_importance_sampling_ratio=2"
        )
        yield Problem(subject, text)
    if config.policy.moe.replay_routing:
        text = (
            "does not go with policy.moe.replay_routing=true: when the weights change under a response, the engine "
            "records the experts of its earlier tokens under the new weights"
        )
        yield Problem(subject, text)


def oversampling_problems(config: Config) -> Iterator[Problem]:
    """Settings that exclude oversampling, where a step takes the first prompts that are complete."""
    options = config.loop.async_grpo
    factor, age = options.oversampling_factor, options.max_trajectory_age_steps
    if not options.enabled or factor is None:
        return
    subject = f"{config.algorithm}.async_grpo.oversampling_factor={factor:g}"
    if config.data.streaming:
        yield Problem(subject, "gives prompts back to the data, which a stream does not take; use data.streaming=false")
    if factor >= age + 1:
        text = (
            f"leaves no prompt time beyond its turn: with {config.algorithm}.async_grpo.max_trajectory_age_steps={age} "
            f"a step has to take the oldest ones; "
        )
        below = f"give a factor below {age + 1}, for instance {(age + 2) / 2:g}, or " if age else "give "
        raised = f"{config.algorithm}.async_grpo.max_trajectory_age_steps={int(factor)} or more"
        yield Problem(subject, text + below + raised)
    prompts = config.prompts_per_generation_batch
    if int(factor * prompts) == prompts:
        yield Problem(subject, f"adds no whole prompt to the {prompts} of a step; give at least {1 + 1 / prompts:g}")


def async_cautions(config: Config) -> Iterator[Problem]:
    """Settings of asynchronous training that are allowed and may not be intended."""
    options, loss = config.loop.async_grpo, config.loss_fn
    if not options.enabled or options.max_trajectory_age_steps == 0:
        return
    if loss.truncated_importance_sampling_type is None:
        text = (
            "leaves the weights of samples of earlier weights without a limit; "
            "loss_fn.truncated_importance_sampling_type=tis and loss_fn.truncated_importance_sampling_ratio=2 give one"
        )
        yield Problem(f"{config.algorithm}.async_grpo.enabled=True", text)
    if config.loop.seq_logprob_error_threshold is not None:
        text = "leaves out responses whose weights are old, as it does those that the two frameworks disagree about"
        subject = f"{config.algorithm}.seq_logprob_error_threshold={config.loop.seq_logprob_error_threshold:g}"
        yield Problem(subject, text)
