"""Checks of the training loop, oversampling, PPO, rows to learn from, and the debug modes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_grpo.config.algorithms import OWN_SECTIONS, explain_unread
from megatron_grpo.config.data_schema import BUILT_IN, ENVIRONMENT_PREFIX, REWARD_FUNCTIONS, is_model_folder
from megatron_grpo.config.errors import suggest_name, to_text
from megatron_grpo.config.keys import list_changes
from megatron_grpo.config.loop_schema import (
    HELD_OUT_LOSS,
    LOOPS,
    VALIDATION_METRICS,
    VALIDATION_PREFIX,
    DPOConfig,
    KTOConfig,
    PPOAdvantageConfig,
    PPOConfig,
    SampledLoopConfig,
)
from megatron_grpo.config.metric_names import list_possible_metrics, list_step_metrics
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.preflight.rules import Rule, format_value, list_trained_models
from megatron_grpo.run.checkpoints import choose_ranking


def check_loop(config: Config) -> Iterator[Rule]:
    """Check optimizer steps, reference, early stop, checkpoints and schedules."""
    yield from _check_optimizer_steps(config)
    if isinstance(config.loop, SampledLoopConfig):
        yield from _check_sampling(config, config.loop)
    yield from _check_data(config)
    yield from _check_early_stop(config)
    is_settled = bool(config.method.rows) or not config.has_correctness
    checkpointing = choose_ranking(config) if is_settled else config.checkpointing
    ranked_by = checkpointing.metric_name
    if config.has_checkpoints and config.checkpointing.keep_top_k is not None and ranked_by is not None:
        check_metric = _check_validation_metric if ranked_by.startswith(VALIDATION_PREFIX) else _check_step_metric
        yield from check_metric(config, "checkpointing.metric_name=", ranked_by)
    yield from _check_schedules(config)


def _check_early_stop(config: Config) -> Iterator[Rule]:
    loop, stop = config.loop, config.loop.early_stop
    if not stop.enabled:
        return
    yield from _check_validation_metric(config, "LOOP.early_stop.metric_name=", stop.metric_name)
    text = "has no criterion; give LOOP.early_stop.threshold or LOOP.early_stop.patience"
    yield stop.threshold is None and stop.patience is None, "LOOP.early_stop.enabled=", text
    text = "decides after a validation; needs data.val_path and LOOP.val_period"
    yield not config.data.validation_sets or loop.val_period == 0, "LOOP.early_stop.enabled=", text


def _check_sampling(config: Config, loop: SampledLoopConfig) -> Iterator[Rule]:
    asynchrony = loop.async_grpo
    text = "samples prompts that nothing would train on; needs LOOP.use_dynamic_sampling=true"
    yield loop.batch_multiplier != 1 and not loop.use_dynamic_sampling, "LOOP.batch_multiplier=", text
    text = "keeps prompts whose samples differ; needs LOOP.num_generations_per_prompt of 2 or more"
    yield loop.use_dynamic_sampling and loop.num_generations_per_prompt < 2, "LOOP.use_dynamic_sampling=", text
    text = "moves a reference policy that the loss does not use; needs loss_fn.reference_policy_kl_penalty > 0"
    yield loop.sync_ref_model and config.loss_fn.reference_policy_kl_penalty == 0, "LOOP.sync_ref_model=", text
    text = "keeps rollouts for a run that goes on from a checkpoint; needs checkpointing.enabled=true"
    keeps = config.rollouts.keep_finished
    yield keeps and not config.has_checkpoints, "rollouts.keep_finished=", text
    if not asynchrony.enabled:
        return
    text = "keeps nothing that a resume could take: LOOP.async_grpo.oversampling_factor draws waiting prompts with new"
    text += " seeds; use false"
    yield keeps and asynchrony.oversampling_factor is not None, "rollouts.keep_finished=", text
    text = "gives prompts back to the data, which a stream does not take; use data.streaming=false"
    is_streamed = asynchrony.oversampling_factor is not None and config.data.streaming
    yield is_streamed, "LOOP.async_grpo.oversampling_factor=", text
    text = "trains on samples of earlier weights without an importance correction; give"
    text += " loss_fn.use_importance_sampling_correction=true, best with"
    text += " loss_fn.truncated_importance_sampling_type=tis and loss_fn.truncated_importance_sampling_ratio=2"
    is_corrected = config.loss_fn.corrects_sampling or not config.uses_rewards
    yield asynchrony.can_sample_ahead and not is_corrected, "LOOP.async_grpo.enabled=", text


def _check_data(config: Config) -> Iterator[Rule]:
    """Check records of steps, the curriculum, and data named twice."""
    data = config.data
    if config.logger.replay_every is not None:
        text = "keeps the checkpoint before each replayable step; needs checkpointing.enabled=true and debug.train=true"
        yield not config.has_checkpoints, "logger.replay_every=", text
        text = "is for algorithm=grpo: the values and returns of algorithm=ppo are not recorded"
        yield config.method.has_value_model, "logger.replay_every=", text
        text = "does not record the likelihood of the environment's tokens; use loss_fn.environment_nll_weight=0"
        yield config.imitates_environment, "logger.replay_every=", text
        text = "does not record entropies, by which high-entropy chooses; leave it out of loss_fn.corrections"
        yield config.needs_entropies, "logger.replay_every=", text
        text = "cannot record the experts that engines choose; use policy.moe.replay_routing=false"
        yield config.policy.moe.replay_routing, "logger.replay_every=", text
    if data.curriculum.column is not None:
        text = "needs the level of every row before training, which a stream does not have; use data.streaming=false"
        yield data.streaming, "data.curriculum.column=", text
        text = "chooses prompts by the responses to the last ones, which async_grpo samples ahead;"
        text += " use LOOP.async_grpo.enabled=false"
        yield config.async_sampling.enabled, "data.curriculum.column=", text
    has_two = data.train_path != MISSING and data.train_sets
    yield has_two, "data.train_path=", "and data.train_sets both name training rows; give one of them"


def _check_schedules(config: Config) -> Iterator[Rule]:
    for section, model in list_trained_models(config).items():
        optimizer = model.optimizer
        lr, ratio = format_value(optimizer.lr), format_value(optimizer.warmup_ratio)
        text = f"is above {section}.optimizer.lr={lr}, from which the learning rate falls to it"
        yield optimizer.min_lr > optimizer.lr, f"{section}.optimizer.min_lr=", text
        text = f"is for a function of your own, and {section}.optimizer.decay_style={optimizer.decay_style} is none"
        for name, value in optimizer.decay_options.items() if optimizer.has_built_in_decay else ():
            yield True, f"{section}.optimizer.decay_options.{name}={to_text(value)}", text
        text = f"and {section}.optimizer.warmup_ratio={ratio} both set the length of the warm-up; give one of them"
        is_given_twice = optimizer.warmup_steps > 0 and optimizer.warmup_ratio is not None
        yield is_given_twice, f"{section}.optimizer.warmup_steps=", text
        # Without decay_steps the schedule follows the length of the run, and a short run may end while it warms up.
        text = f"leaves no step for the decay, which ends at step {optimizer.decay_steps}"
        decays = optimizer.decay_style not in ("constant", "constant_with_warmup") and optimizer.decay_steps is not None
        has_no_decay = decays and optimizer.warmup_steps >= (optimizer.decay_steps or 0)
        yield has_no_decay, f"{section}.optimizer.warmup_steps=", text


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
    metrics = VALIDATION_METRICS if config.needs_generation or not config.method.rows else ()
    names = [f"{VALIDATION_PREFIX}{metric}" for metric in metrics]
    names += [f"{VALIDATION_PREFIX}{HELD_OUT_LOSS}"] if config.method.rows else []
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
    text = f"the reward functions do not say which responses are correct; name one in {keys},"
    text += f" or take {name.replace('accuracy', 'reward')}"
    return text


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
    text = f"is too large: with {key}={age} every step must take the oldest prompts,"
    text += f" so oversampling gains nothing. {advice} {key}={int(factor)} or more"
    yield factor >= age + 1, subject, text
    text = f"adds no whole prompt to the {prompts} of a step; give at least {1 + 1 / prompts:g}"
    yield int(factor * prompts) == prompts, subject, text


def check_read_keys(config: Config) -> Iterator[Rule]:
    """Find changed settings that the algorithm does not read.

    Those of loss_fn are remarked on instead: a recipe's may stay while its algorithm is exchanged.
    """
    for section in sorted(OWN_SECTIONS - {"loss_fn", "teachers", *LOOPS} | {config.loop_name}):
        for key, value in list_changes(config, section):
            yield not config.method.has_read(key), f"{key}={value}", explain_unread(config, key) or ""
    for task in config.teachers:
        key = f"teachers.{task}"
        yield not config.method.has_read(f"{key}."), key, explain_unread(config, f"{key}.") or ""


def check_algorithm(config: Config) -> Iterator[Rule]:
    """Check settings of the algorithm against each other."""
    if isinstance(config.loop, PPOConfig):
        yield from _check_ppo(config, config.loop)
    if config.method.rows:
        yield from _check_rows(config)
        if config.needs_prev_logprobs:
            yield from _check_comparison(config)
        return
    text = "is for algorithms that learn the rows' responses; use null"
    yield config.data.response_key is not None, "data.response_key=", text
    text = "is for algorithms that learn from rows; debug.rollouts_from repeats the steps of a recorded run"
    yield config.data.from_rollouts is not None, "data.from_rollouts=", text


def _check_ppo(config: Config, ppo: PPOConfig) -> Iterator[Rule]:
    penalty = format_value(config.loss_fn.reference_policy_kl_penalty)
    text = f"loads no reference policy, and loss_fn.reference_policy_kl_penalty={penalty} needs one; set it to 0"
    lacks_reference = ppo.skip_reference_policy_logprobs_calculation and config.loss_fn.reference_policy_kl_penalty > 0
    yield lacks_reference, "ppo.skip_reference_policy_logprobs_calculation=", text
    text = "this is a run on CPU: cluster.gpus_per_node is 0"
    yield ppo.calculate_advantages_on_gpu and config.cluster.gpus == 0, "ppo.calculate_advantages_on_gpu=", text
    text = f"leaves none of the ppo.max_num_steps={ppo.max_num_steps} steps to the policy"
    yield ppo.policy_training_start_step >= ppo.max_num_steps, "ppo.policy_training_start_step=", text
    estimator = ppo.adv_estimator
    lambdas = {
        "gae_lambda": estimator.gae_lambda != PPOAdvantageConfig().gae_lambda,
        "gae_lambda_policy": estimator.gae_lambda_policy is not None,
        "gae_lambda_value": estimator.gae_lambda_value is not None,
        "length_adaptive_alpha": estimator.length_adaptive_alpha,
    }
    text = "has no meaning with ppo.adv_estimator.name=raw_reward, which takes rewards as they are"
    for name, is_changed in lambdas.items():
        yield estimator.name == "raw_reward" and is_changed, f"ppo.adv_estimator.{name}=", text
    text = "excludes ppo.adv_estimator.gae_lambda_policy: both say what the policy's lambda is"
    is_given_twice = estimator.length_adaptive_alpha and estimator.gae_lambda_policy is not None
    yield estimator.name == "gae" and is_given_twice, "ppo.adv_estimator.length_adaptive_alpha=", text


def _check_rows(config: Config) -> Iterator[Rule]:
    data, name = config.data, config.algorithm
    generations, per_row = config.loop.num_generations_per_prompt, 2 if config.has_pairs else 1
    text = f"counts samples of a prompt, and a row is {'a pair' if config.has_pairs else 'one sequence'};"
    text += f" use {per_row}"
    yield generations != per_row, "LOOP.num_generations_per_prompt=", text
    has_two = data.from_rollouts is not None and data.train_sets
    yield has_two, "data.from_rollouts=", "and data.train_sets both name training rows; give one of them"
    text = "would cut conversations that are learnt; use filter or error"
    yield data.long_prompts == "cut_left", "data.long_prompts=", text
    text = f"cannot feed algorithm={name}, which counts its rows first; give data.train_path a file, or a set that is"
    text += " loaded"
    yield data.streaming, "data.streaming=", text
    text = f"replaces sampling, and algorithm={name} samples nothing; use null"
    yield config.debug.rollouts_from is not None, "debug.rollouts_from=", text
    text = f"leaves nothing to do, because algorithm={name} samples only for validation; use true"
    yield not config.debug.train, "debug.train=", text
    text = "needs experts that engines chose, and rows of the data have none; use false"
    yield config.policy.moe.replay_routing, "policy.moe.replay_routing=", text
    yield config.logger.replay_every is not None, "logger.replay_every=", "records steps that sample; use null"
    text = f"shows sampled responses, and algorithm={name} learns from rows; use false"
    yield config.logger.log_completions, "logger.log_completions=", text


def _check_comparison(config: Config) -> Iterator[Rule]:
    """Check rows whose responses are compared before they are learnt."""
    text = "names the response of single rows, and these are pairs; name data.chosen_key and data.rejected_key"
    yield config.has_pairs and config.data.response_key is not None, "data.response_key=", text
    text = "leaves no other row, whose response the reference point needs; use 2 or more"
    loop = config.loop
    yield isinstance(loop, KTOConfig) and loop.num_prompts_per_step < 2, "LOOP.num_prompts_per_step=", text
    yield config.data.from_rollouts is not None, "data.from_rollouts=", "is for algorithm=sft; use null"
    text = "would make several optimizer steps of one, whose rows are compared before the first; use null,"
    text += " and fewer LOOP.num_prompts_per_step"
    yield config.policy.train_global_batch_samples is not None, "policy.train_global_batch_samples=", text
    is_scored = config.method.head == "score"
    text = "cannot train a reward model: adapters would leave its head out; use 0"
    yield is_scored and config.policy.lora.rank > 0, "policy.lora.rank=", text
    text = "is for engines that sample, and nothing samples with a reward model; use null"
    yield is_scored and config.policy.quantization is not None, "policy.quantization=", text
    text = "is for dpo.loss_type=sigmoid or simpo; use 0"
    is_ipo = isinstance(loop, DPOConfig) and loop.loss_type == "ipo" and loop.label_smoothing != 0
    yield is_ipo, "dpo.label_smoothing=", text


def check_debug_modes(config: Config) -> Iterator[Rule]:
    """Check settings that need the part of the run which is left out."""
    loop, data = config.loop, config.data
    text = "needs the rollouts to be written; set logger.rollouts to sample or all"
    yield config.logger.log_completions and config.logger.rollouts == "off", "logger.log_completions=", text
    if config.reads_prompts:
        if config.debug.train:
            return
        text = "samples while steps train, and debug.train=false starts no rank of the policy; use false"
        yield config.async_sampling.enabled, "LOOP.async_grpo.enabled=", text
        text = "is read by ranks of the policy, and debug.train=false starts none; export the checkpoint (python -m"
        text += " megatron_grpo.export), and give its folder as policy.model.path"
        yield config.checkpointing.resume not in ("auto", "none"), "checkpointing.resume=", text
        text = "serves weights that a refit sends, and debug.train=false starts no rank of the policy;"
        text += " use engines of the run's own, generation.server.urls=[]"
        yield config.generation.server.urls, "generation.server.urls=", text
        text = "rounds the weights on their way to the engines, and debug.train=false starts no rank of the policy;"
        text += " use null"
        yield config.policy.quantization is not None, "policy.quantization=", text
        return
    text = f"leaves nothing to do beside debug.rollouts_from={config.debug.rollouts_from}; give one of them"
    yield not config.debug.train, "debug.train=", text
    if not config.debug.train:
        return
    text = "samples ahead, and debug.rollouts_from starts no engine; use false"
    yield config.async_sampling.enabled, "LOOP.async_grpo.enabled=", text
    text = "needs the experts that engines chose, which recorded rollouts do not have; use false"
    yield config.policy.moe.replay_routing, "policy.moe.replay_routing=", text
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
