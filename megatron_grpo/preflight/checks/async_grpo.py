"""Checks of sampling ahead of training: what the loss and the model have to be for it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def async_problems(config: Config) -> Iterator[Problem]:
    """What stands against training on samples of earlier weights."""
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
    """What stands against taking the first prompts that are complete."""
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
    """What is right with samples of earlier weights and may not be meant."""
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
