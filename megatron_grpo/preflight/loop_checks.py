"""Checks of the training loop, its asynchronous mode, PPO and the debug modes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_grpo.config.compose import explain_foreign_key
from megatron_grpo.config.data_schema import (
    BUILT_IN,
    ENVIRONMENT_FIGURE,
    REWARD_FUNCTIONS,
    EnvironmentConfig,
    is_model_folder,
)
from megatron_grpo.config.errors import suggest_name
from megatron_grpo.config.keys import list_changes
from megatron_grpo.config.loop_schema import READ_BY, VALIDATION_METRICS, VALIDATION_PREFIX, switch_algorithm
from megatron_grpo.config.metric_names import list_possible_metrics, list_step_metrics
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.rules import Rule


def check_loop(config: Config) -> Iterator[Rule]:
    """Check optimizer steps, reference, early stop, checkpoints and schedules."""
    yield from _check_optimizer_steps(config)
    loop = config.training_loop
    text = "samples prompts that nothing would train on; needs LOOP.use_dynamic_sampling=true"
    yield loop.batch_multiplier != 1 and not loop.use_dynamic_sampling, "LOOP.batch_multiplier=", text
    text = "keeps prompts whose samples differ; needs LOOP.num_generations_per_prompt of 2 or more"
    yield loop.use_dynamic_sampling and loop.num_generations_per_prompt < 2, "LOOP.use_dynamic_sampling=", text
    text = "moves a reference policy that the loss does not use; needs loss_fn.reference_policy_kl_penalty > 0"
    yield loop.sync_ref_model and config.loss_fn.reference_policy_kl_penalty == 0, "LOOP.sync_ref_model=", text
    stop = loop.early_stop
    if stop.enabled:
        text = "has no criterion; give LOOP.early_stop.threshold or LOOP.early_stop.patience"
        yield stop.threshold is None and stop.patience is None, "LOOP.early_stop.enabled=", text
        yield from _check_validation_metric(config, "LOOP.early_stop.metric_name=", stop.metric_name)
        text = "decides after a validation; needs data.val_path and LOOP.val_period"
        yield not config.data.validation_sets or loop.val_period == 0, "LOOP.early_stop.enabled=", text
    ranked_by = config.checkpointing.metric_name
    if config.has_checkpoints and config.checkpointing.keep_top_k is not None and ranked_by is not None:
        is_of_validation = ranked_by.startswith(VALIDATION_PREFIX)
        check_metric = _check_validation_metric if is_of_validation else _check_step_metric
        yield from check_metric(config, "checkpointing.metric_name=", ranked_by)
    has_replays = config.logger.replay_every is not None
    text = "keeps the checkpoint before each replayable step; needs checkpointing.enabled=true and debug.train=true"
    yield has_replays and not config.has_checkpoints, "logger.replay_every=", text
    text = "is for algorithm=grpo: the values and returns of algorithm=ppo are not recorded"
    yield has_replays and config.training_loop.has_value_model, "logger.replay_every=", text
    text = "cannot record the experts that engines choose; use policy.moe.replay_routing=false"
    yield has_replays and config.policy.moe.replay_routing, "logger.replay_every=", text
    yield from _check_schedules(config)


def _check_optimizer_steps(config: Config) -> Iterator[Rule]:
    samples, value = config.samples_per_step, config.value_model
    # Each replica of either model trains on a whole number of the slices that both models share.
    slices = math.lcm(config.policy.parallel.data, 1 if value is None else value.parallel.data)
    for section, model in (("policy", config.policy), ("value", value)):
        if model is None or model.train_global_batch_samples is None:
            continue
        size, data = model.train_global_batch_samples, model.parallel.data
        subject = f"{section}.train_global_batch_samples="
        text = f"does not divide the {samples} samples of a step (prompts x generations)"
        yield samples % size, subject, text
        advice = _suggest_batch_size(samples, size, data)
        text = f"does not share out evenly over {section}.parallel.data={data} ranks; {advice}"
        yield not samples % size and size % data, subject, text
        text = (
            f"does not share out evenly over policy.parallel.data={config.policy.parallel.data} and "
            f"value.parallel.data={config.value.parallel.data} ranks together; use a multiple of {slices}"
        )
        yield not samples % size and not size % data and size % slices, subject, text


def _suggest_batch_size(samples: int, size: int, data: int) -> str:
    """Suggest the nearest numbers of samples that `data` ranks can share."""
    usable = [multiple for multiple in range(data, samples + 1, data) if samples % multiple == 0]
    if not usable:
        return f"no size does that divides the {samples} samples of a step"
    nearest = sorted(sorted(usable, key=lambda multiple: abs(multiple - size))[:2])
    return f"use {' or '.join(map(str, nearest))}"


def _check_validation_metric(config: Config, subject: str, name: str) -> Iterator[Rule]:
    names = [f"{VALIDATION_PREFIX}{metric}" for metric in VALIDATION_METRICS]
    names += [f"{VALIDATION_PREFIX}set_{metric}/{of}" for of in config.data.val_sets for metric in VALIDATION_METRICS]
    if name not in names:
        yield True, subject, f"is not a validation metric; these are: {', '.join(names)}"
    elif name == f"{VALIDATION_PREFIX}accuracy" and config.env and not config.has_correctness:
        yield True, subject, _explain_no_accuracy(config, name)


def _check_step_metric(config: Config, subject: str, name: str) -> Iterator[Rule]:
    step_metrics, possible_metrics = list_step_metrics(config), list_possible_metrics(config)
    if name in step_metrics:
        return
    has_figures = any(map(_can_report_figures, config.env.values()))
    if name.removeprefix(ENVIRONMENT_FIGURE) not in ("", name):
        text = "no environment of this run reports figures: functions in reward_funcs and environments of your own can"
        yield not has_figures, subject, text
    elif name == "accuracy" and config.env:
        yield True, subject, _explain_no_accuracy(config, name)
    elif name in possible_metrics:
        yield True, subject, f"is not a metric of this run: {possible_metrics[name]}"
    else:
        names = [*step_metrics, *(VALIDATION_PREFIX + metric for metric in VALIDATION_METRICS)]
        figure = f"; a figure {name} of a reward function or environment is {ENVIRONMENT_FIGURE}{name}"
        suggestion = suggest_name(name, sorted(names)) + (figure if has_figures else "")
        yield True, subject, f"is not a metric of a step{suggestion}"


def _can_report_figures(environment: EnvironmentConfig) -> bool:
    has_functions = not all(map(is_model_folder, environment.reward_funcs))
    return environment.type not in {*BUILT_IN, REWARD_FUNCTIONS} - {"code"} or has_functions


def _explain_no_accuracy(config: Config, name: str) -> str:
    keys = " or ".join(f"env.{task}.correct_func" for task in config.env)
    text = f"the reward functions do not say which responses are correct; name one in {keys}"
    return f"{text}, or take {name.replace('accuracy', 'reward')}"


def _check_schedules(config: Config) -> Iterator[Rule]:
    value = [("value", config.value.optimizer)] if config.training_loop.has_value_model else []
    for section, optimizer in [("policy", config.policy.optimizer), *value]:
        warmup, decay = f"{section}.optimizer.warmup_steps=", optimizer.decay_steps
        text = f"is above {section}.optimizer.lr={optimizer.lr:g}, from which the learning rate falls to it"
        yield optimizer.min_lr > optimizer.lr, f"{section}.optimizer.min_lr=", text
        if optimizer.warmup_ratio is not None and optimizer.warmup_steps:
            text = f"and {section}.optimizer.warmup_ratio={optimizer.warmup_ratio:g} say the same; give one of them"
            yield True, warmup, text
        # Without decay_steps the schedule follows the length of the run, and a short run may end while it warms up.
        is_too_long = not optimizer.is_constant and decay is not None and optimizer.warmup_steps >= decay
        yield is_too_long, warmup, f"leaves no step for the decay, which ends at step {decay}"


def check_async(config: Config) -> Iterator[Rule]:
    """Check training on samples of earlier weights, and oversampling."""
    options = config.training_loop.async_grpo
    text = (
        "trains on samples of earlier weights without an importance correction; give "
        "loss_fn.use_importance_sampling_correction=true, best with loss_fn.truncated_importance_sampling_type=tis "
        "and loss_fn.truncated_importance_sampling_ratio=2"
    )
    is_corrected = config.loss_fn.use_importance_sampling_correction
    yield options.can_sample_ahead and not is_corrected, "LOOP.async_grpo.enabled=", text
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
    advice = f"Use a factor below {age + 1}, or" if age else "Use"
    text = (
        f"is too large: with LOOP.async_grpo.max_trajectory_age_steps={age} every step must take the oldest prompts, "
        f"so oversampling gains nothing. {advice} LOOP.async_grpo.max_trajectory_age_steps={int(factor)} or more"
    )
    yield factor >= age + 1, subject, text
    text = f"adds no whole prompt to the {prompts} of a step; give at least {1 + 1 / prompts:g}"
    yield int(factor * prompts) == prompts, subject, text


def check_async_cautions(config: Config) -> Iterator[Rule]:
    """Find settings of asynchronous training that may not be intended."""
    samples_ahead = config.training_loop.async_grpo.can_sample_ahead
    text = (
        "puts no limit on the importance weights of samples from earlier versions of the policy; "
        "loss_fn.truncated_importance_sampling_type=tis and loss_fn.truncated_importance_sampling_ratio=2 give one"
    )
    yield samples_ahead and config.loss_fn.truncated_importance_sampling_type is None, "LOOP.async_grpo.enabled=", text
    text = "also leaves out responses from earlier versions of the policy, on which the frameworks need not disagree"
    has_threshold = config.training_loop.seq_logprob_error_threshold is not None
    yield samples_ahead and has_threshold, "LOOP.seq_logprob_error_threshold=", text


def check_ppo(config: Config) -> Iterator[Rule]:
    """Check settings of PPO, and find changed settings of the other algorithm."""
    for section in READ_BY[switch_algorithm(config.algorithm)]:
        for key, value in list_changes(config, section):
            yield True, f"{key}={value}", explain_foreign_key(key, config.algorithm)
    if config.algorithm != "ppo":
        return
    ppo, penalty = config.ppo, config.loss_fn.reference_policy_kl_penalty
    text = f"leaves none of the ppo.max_num_steps={ppo.max_num_steps} steps to the policy"
    yield ppo.policy_training_start_step >= ppo.max_num_steps, "ppo.policy_training_start_step=", text
    text = f"loads no reference policy, and loss_fn.reference_policy_kl_penalty={penalty:g} needs one; set it to 0"
    has_no_reference = ppo.skip_reference_policy_logprobs_calculation
    yield has_no_reference and penalty > 0, "ppo.skip_reference_policy_logprobs_calculation=", text
    text = "this is a run on CPU: cluster.gpus_per_node is 0"
    yield ppo.calculate_advantages_on_gpu and config.cluster.gpus == 0, "ppo.calculate_advantages_on_gpu=", text
    estimator, prefix = ppo.adv_estimator, "ppo.adv_estimator"
    is_raw, alpha = estimator.name == "raw_reward", estimator.length_adaptive_alpha
    text = f"has no meaning with {prefix}.name=raw_reward, which takes rewards as they are"
    for name in ("gae_lambda", "gae_lambda_policy", "gae_lambda_value"):
        value, default = getattr(estimator, name), getattr(type(estimator)(), name)
        yield is_raw and value != default, f"{prefix}.{name}={value}", text
    yield is_raw and alpha, f"{prefix}.length_adaptive_alpha={alpha}", text
    text = f"excludes {prefix}.gae_lambda_policy: both say what the policy's lambda is"
    has_two_lambdas = alpha and estimator.gae_lambda_policy is not None
    yield not is_raw and has_two_lambdas, f"{prefix}.length_adaptive_alpha=", text


def check_debug_modes(config: Config) -> Iterator[Rule]:
    """Check settings that need the part of the run which is left out."""
    debug, logger = config.debug, config.logger
    text = "needs the rollouts to be written; set logger.rollouts to sample or all"
    yield logger.log_completions and logger.rollouts == "off", "logger.log_completions=", text
    text = f"leaves nothing to do beside debug.rollouts_from={debug.rollouts_from}; give one of them"
    yield not config.needs_generation and not debug.train, "debug.train=", text
    if not config.needs_generation and debug.train:
        yield from _check_without_engines(config)
    elif not debug.train and config.needs_generation:
        yield from _check_without_policy(config)


def _check_without_engines(config: Config) -> Iterator[Rule]:
    because = "and debug.rollouts_from starts no engine"
    loop, data = config.training_loop, config.data
    yield loop.async_grpo.enabled, "LOOP.async_grpo.enabled=", f"samples ahead, {because}; use false"
    causes_of_validation = {
        f"LOOP.val_period={loop.val_period}": loop.val_period > 0,
        "LOOP.val_at_start=True": loop.val_at_start,
        "LOOP.val_at_end=True": loop.val_at_end,
    }
    if data.validation_sets and any(causes_of_validation.values()):
        causes = " and ".join(setting for setting, is_on in causes_of_validation.items() if is_on)
        off = "data.val_path=null" if data.val_path is not None else "data.val_sets={}"
        key = next(iter(data.validation_sets))
        yield True, f"{key}={data.validation_sets[key].path}", f"is sampled by {causes}, {because}; use {off}"
    text = "needs the experts that engines chose, which recorded rollouts do not have; use false"
    yield config.policy.moe.replay_routing, "policy.moe.replay_routing=", text


def _check_without_policy(config: Config) -> Iterator[Rule]:
    because = "and debug.train=false starts no rank of the policy"
    text = f"samples while steps train, {because}; use false"
    yield config.training_loop.async_grpo.enabled, "LOOP.async_grpo.enabled=", text
    text = (
        f"is read by ranks of the policy, {because[4:]}; export the checkpoint (python -m megatron_grpo.export), "
        "and give its folder as policy.model.path"
    )
    yield config.checkpointing.resume not in ("auto", "none"), "checkpointing.resume=", text
    text = f"serves weights that a refit sends, {because}; use engines of the run's own, generation.server.urls=[]"
    yield config.generation.server.urls, "generation.server.urls=", text
    text = f"rounds the weights on their way to the engines, {because}; use null"
    yield config.policy.quantization is not None, "policy.quantization=", text
