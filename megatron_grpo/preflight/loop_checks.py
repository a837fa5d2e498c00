"""Checks of the training loop, oversampling, PPO, rows to learn from, and the debug modes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_grpo.config.data_schema import BUILT_IN, ENVIRONMENT_PREFIX, REWARD_FUNCTIONS, is_model_folder
from megatron_grpo.config.errors import suggest_name
from megatron_grpo.config.keys import list_changes
from megatron_grpo.config.loop_names import explain_foreign_key
from megatron_grpo.config.loop_schema import HELD_OUT_LOSS, VALIDATION_METRICS, VALIDATION_PREFIX
from megatron_grpo.config.metric_names import list_possible_metrics, list_step_metrics
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.rules import Rule, list_conflicts


def check_loop(config: Config) -> Iterator[Rule]:
    """Check optimizer steps, reference, early stop, checkpoints and schedules."""
    yield from _check_optimizer_steps(config)
    yield from list_conflicts(config, "loop")
    stop = config.training_loop.early_stop
    if stop.enabled:
        yield from _check_validation_metric(config, "LOOP.early_stop.metric_name=", stop.metric_name)
    is_settled = config.training_loop.is_supervised or not config.has_correctness
    checkpointing = config.ranked_checkpointing if is_settled else config.checkpointing
    ranked_by = checkpointing.metric_name
    if config.has_checkpoints and config.checkpointing.keep_top_k is not None and ranked_by is not None:
        check_metric = _check_validation_metric if ranked_by.startswith(VALIDATION_PREFIX) else _check_step_metric
        yield from check_metric(config, "checkpointing.metric_name=", ranked_by)
    yield from list_conflicts(config, "schedules")


def _check_optimizer_steps(config: Config) -> Iterator[Rule]:
    samples, value = config.samples_per_step, config.value_model
    # Each replica of either model trains on a whole number of the slices that both models share.
    slices = math.lcm(config.policy.parallel.data, 1 if value is None else value.parallel.data)
    for section, model in (("policy", config.policy), ("value", value)):
        if model is None or model.train_global_batch_samples is None:
            continue
        size, data = model.train_global_batch_samples, model.parallel.data
        subject = f"{section}.train_global_batch_samples="
        yield samples % size, subject, f"does not divide the {samples} samples of a step (prompts x generations)"
        advice = _suggest_batch_size(samples, size, data)
        text = f"does not share out evenly over {section}.parallel.data={data} ranks; {advice}"
        yield not samples % size and size % data, subject, text
        value_data = config.value.parallel.data
        ranks = f"policy.parallel.data={config.policy.parallel.data} and value.parallel.data={value_data} ranks"
        text = f"does not share out evenly over {ranks} together; use a multiple of {slices}"
        yield not samples % size and not size % data and size % slices, subject, text


def _suggest_batch_size(samples: int, size: int, data: int) -> str:
    """Suggest the nearest numbers of samples that `data` ranks can share."""
    usable = [multiple for multiple in range(data, samples + 1, data) if samples % multiple == 0]
    if not usable:
        return f"no size does that divides the {samples} samples of a step"
    nearest = sorted(sorted(usable, key=lambda multiple: abs(multiple - size))[:2])
    return f"use {' or '.join(map(str, nearest))}"


def _check_validation_metric(config: Config, subject: str, name: str) -> Iterator[Rule]:
    is_supervised = config.training_loop.is_supervised
    metrics = VALIDATION_METRICS if config.needs_generation or not is_supervised else ()
    names = [f"{VALIDATION_PREFIX}{metric}" for metric in metrics]
    names += [f"{VALIDATION_PREFIX}{HELD_OUT_LOSS}"] if is_supervised else []
    names += [
        f"{VALIDATION_PREFIX}set_{metric}/{dataset}"
        for dataset in config.data.val_sets
        for metric in VALIDATION_METRICS
    ]
    if name not in names:
        yield True, subject, f"is not a validation metric; these are: {', '.join(names)}"
    elif name == f"{VALIDATION_PREFIX}accuracy" and config.env and not config.has_correctness:
        yield True, subject, _explain_missing_accuracy(config, name)


def _check_step_metric(config: Config, subject: str, name: str) -> Iterator[Rule]:
    step_metrics, possible_metrics = list_step_metrics(config), list_possible_metrics(config)
    if name in step_metrics:
        return
    # Users' functions and environments may report metrics of any name; of the built-in ones only `code` reports some.
    types_without = {*BUILT_IN, REWARD_FUNCTIONS} - {"code"}
    can_report_metrics = any(
        environment.type not in types_without or not all(map(is_model_folder, environment.reward_funcs))
        for environment in config.env.values()
    )
    if name.removeprefix(ENVIRONMENT_PREFIX) not in ("", name):
        text = "no environment of this run reports metrics: functions in reward_funcs and environments of your own can"
        yield not can_report_metrics, subject, text
    elif name == "accuracy" and config.env:
        yield True, subject, _explain_missing_accuracy(config, name)
    elif name in possible_metrics:
        yield True, subject, f"is not a metric of this run: {possible_metrics[name]}"
    else:
        names = [*step_metrics, *(VALIDATION_PREFIX + metric for metric in VALIDATION_METRICS)]
        figure = f"; a metric {name} of a reward function or environment is {ENVIRONMENT_PREFIX}{name}"
        suggestion = suggest_name(name, sorted(names)) + (figure if can_report_metrics else "")
        yield True, subject, f"is not a metric of a step{suggestion}"


def _explain_missing_accuracy(config: Config, name: str) -> str:
    keys = " or ".join(f"env.{task}.correct_func" for task in config.env)
    text = f"the reward functions do not say which responses are correct; name one in {keys}"
    return f"{text}, or take {name.replace('accuracy', 'reward')}"


def check_oversampling(config: Config) -> Iterator[Rule]:
    """Check that oversampling adds prompts, and prompts that stay young enough."""
    options, prompts = config.async_sampling, config.prompts_per_generation_batch
    factor, age = options.oversampling_factor, options.max_trajectory_age_steps
    if not options.enabled or factor is None:
        return
    subject = "LOOP.async_grpo.oversampling_factor="
    # At most age + 1 steps' prompts may be in flight, or the oldest would be too old to train on.
    advice = f"Use a factor below {age + 1}, or" if age else "Use"
    key = "LOOP.async_grpo.max_trajectory_age_steps"
    text = f"is too large: with {key}={age} every step must take the oldest prompts, so oversampling gains nothing"
    yield factor >= age + 1, subject, f"{text}. {advice} {key}={int(factor)} or more"
    text = f"adds no whole prompt to the {prompts} of a step; give at least {1 + 1 / prompts:g}"
    yield int(factor * prompts) == prompts, subject, text


def check_ppo(config: Config) -> Iterator[Rule]:
    """Check settings of PPO, which other runs leave at their defaults."""
    for section in ("value", "value_loss_fn") if config.algorithm != "ppo" else ():
        for key, value in list_changes(config, section):
            yield True, f"{key}={value}", explain_foreign_key(key, config.algorithm)
    if config.algorithm == "ppo":
        yield from list_conflicts(config, "ppo")


def check_supervised(config: Config) -> Iterator[Rule]:
    """Check settings of algorithms that learn from rows."""
    if not config.training_loop.is_supervised:
        yield from list_conflicts(config, "sampled")
        return
    yield from list_conflicts(config, "supervised")


def check_debug_modes(config: Config) -> Iterator[Rule]:
    """Check settings that need the part of the run which is left out."""
    yield from list_conflicts(config, "debug")
    if config.reads_prompts and not config.debug.train:
        yield from list_conflicts(config, "without_policy")
    if config.reads_prompts or not config.debug.train:
        return
    loop, data = config.training_loop, config.data
    causes_of_validation = {
        f"LOOP.val_period={loop.val_period}": loop.val_period > 0,
        "LOOP.val_at_start=True": loop.val_at_start,
        "LOOP.val_at_end=True": loop.val_at_end,
    }
    # A set without a validation is harmless: nothing reads it.
    if data.validation_sets and any(causes_of_validation.values()):
        causes = " and ".join(setting for setting, is_on in causes_of_validation.items() if is_on)
        off = "data.val_path=null" if data.val_path is not None else "data.val_sets={}"
        key = next(iter(data.validation_sets))
        text = f"is sampled by {causes}, and debug.rollouts_from starts no engine; use {off}"
        yield True, f"{key}={data.validation_sets[key].path}", text
