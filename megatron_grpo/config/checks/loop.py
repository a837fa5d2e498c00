"""Checks of the loop (optimizer steps, reference, early stop, checkpoints, schedules), of PPO, and of debug modes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from megatron_grpo.config.compose import misplaced
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import changed
from megatron_grpo.config.loop_schema import (
    READ_BY,
    VALIDATION_METRICS,
    VALIDATION_PREFIX,
    PPOAdvantageConfig,
    other_than,
)
from megatron_grpo.config.metric_names import ALL_STEP_METRICS, step_metrics
from megatron_grpo.config.schema import Config


def loop_problems(config: Config) -> Iterator[Problem]:
    """Settings of the loop that do not fit together."""
    yield from _optimizer_steps(config)
    yield from _dynamic_sampling(config)
    yield from _reference(config)
    yield from _early_stop(config)
    yield from _checkpointing(config)
    yield from _schedules(config)


def _optimizer_steps(config: Config) -> Iterator[Problem]:
    samples, value = config.samples_per_step, config.value_model
    shards = math.lcm(config.policy.parallel.data, 1 if value is None else value.parallel.data)
    for section, model in (("policy", config.policy), ("value", value)):
        if model is None or model.train_global_batch_samples is None:
            continue
        size, data = model.train_global_batch_samples, model.parallel.data
        subject = f"{section}.train_global_batch_samples={size}"
        if samples % size:
            yield Problem(subject, f"does not divide the {samples} samples of a step (prompts x generations)")
        elif size % data:
            yield Problem(subject, f"does not share out evenly over {section}.parallel.data={data} ranks")
        elif size % shards:  # each replica of either model trains on whole shards of the step
            text = (
                f"does not share out evenly over policy.parallel.data={config.policy.parallel.data} and "
                f"value.parallel.data={config.value.parallel.data} ranks together; use a multiple of {shards}"
            )
            yield Problem(subject, text)


def _dynamic_sampling(config: Config) -> Iterator[Problem]:
    loop, section = config.loop, config.algorithm
    if loop.batch_multiplier != 1 and not loop.use_dynamic_sampling:
        text = f"samples prompts that nothing would train on; needs {section}.use_dynamic_sampling=true"
        yield Problem(f"{section}.batch_multiplier={loop.batch_multiplier:g}", text)
    if loop.use_dynamic_sampling and loop.num_generations_per_prompt < 2:
        text = f"keeps prompts whose samples differ; needs {section}.num_generations_per_prompt of 2 or more"
        yield Problem(f"{section}.use_dynamic_sampling=True", text)


def _reference(config: Config) -> Iterator[Problem]:
    if config.loop.sync_ref_model and config.loss_fn.reference_policy_kl_penalty == 0:
        text = "moves what nothing is compared with; needs loss_fn.reference_policy_kl_penalty > 0"
        yield Problem(f"{config.algorithm}.sync_ref_model=True", text)


def _early_stop(config: Config) -> Iterator[Problem]:
    stop, section = config.loop.early_stop, config.algorithm
    if not stop.enabled:
        return
    if stop.threshold is None and stop.patience is None:
        text = f"nothing says when; give {section}.early_stop.threshold or {section}.early_stop.patience"
        yield Problem(f"{section}.early_stop.enabled=True", text)
    yield from _validation_metric(config, f"{section}.early_stop.metric_name", stop.metric_name)
    if not config.data.validation or config.loop.val_period == 0:
        text = f"decides after a validation; needs data.val_path and {section}.val_period"
        yield Problem(f"{section}.early_stop.enabled=True", text)


def _checkpointing(config: Config) -> Iterator[Problem]:
    checkpointing = config.checkpointing
    key, name = "checkpointing.metric_name", checkpointing.metric_name
    if not config.saves or checkpointing.keep_top_k is None:
        return
    if name == "accuracy" and _nothing_is_correct(config):
        yield _no_accuracy(config, key, name)
    elif not name.startswith(VALIDATION_PREFIX):
        yield from _step_metric(config, key, name)
        return
    unknown = list(_validation_metric(config, key, name))
    yield from unknown
    if not unknown and not _validates(config):
        text = f"ranks checkpoints, but there is no validation; give data.val_path and {config.algorithm}.val_period"
        yield Problem(f"{key}={name}", text)


def _validation_metric(config: Config, key: str, name: str) -> Iterator[Problem]:
    """A metric that validation does not produce."""
    names = [f"{VALIDATION_PREFIX}{one}" for one in VALIDATION_METRICS]
    names += [f"{VALIDATION_PREFIX}set_{one}/{of}" for of in config.data.val_sets for one in VALIDATION_METRICS]
    if name not in names:
        yield Problem(f"{key}={name}", f"is no validation metric; there is {', '.join(names)}")
    elif name == f"{VALIDATION_PREFIX}accuracy" and _nothing_is_correct(config):
        yield _no_accuracy(config, key, name)


def _step_metric(config: Config, key: str, name: str) -> Iterator[Problem]:
    """A metric that no step of this run has."""
    known = step_metrics(config)
    if name in known:
        return
    if name in ALL_STEP_METRICS:
        yield Problem(f"{key}={name}", f"is no metric of this run: {ALL_STEP_METRICS[name]}")
        return
    close = difflib.get_close_matches(name, [*known, *(VALIDATION_PREFIX + one for one in VALIDATION_METRICS)], n=1)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(sorted(known))}"
    yield Problem(f"{key}={name}", f"is no metric of a step; {hint}")


def _nothing_is_correct(config: Config) -> bool:
    return bool(config.env) and not config.knows_correctness


def _no_accuracy(config: Config, key: str, name: str) -> Problem:
    keys = " or ".join(f"env.{task}.correct_func" for task in config.env)
    text = f"the reward functions do not say which responses are correct; name one in {keys}"
    return Problem(f"{key}={name}", f"{text}, or take {name.replace('accuracy', 'reward')}")


def _validates(config: Config) -> bool:
    """Whether a run validates at all."""
    loop = config.loop
    return bool(config.data.validation) and bool(loop.val_period or loop.val_at_start or loop.val_at_end)


def _schedules(config: Config) -> Iterator[Problem]:
    value = [("value", config.value.optimizer)] if config.loop.has_value_model else []
    for section, optimizer in [("policy", config.policy.optimizer), *value]:
        if optimizer.min_lr > optimizer.lr:
            text = f"is above {section}.optimizer.lr={optimizer.lr:g}, which it is the end of"
            yield Problem(f"{section}.optimizer.min_lr={optimizer.min_lr:g}", text)
        # Without decay_steps the schedule follows the length of the run, and a short run may end while it warms up.
        decay = optimizer.decay_steps
        if optimizer.warmup_ratio is not None and optimizer.warmup_steps:
            text = f"and {section}.optimizer.warmup_ratio={optimizer.warmup_ratio:g} say the same; give one of them"
            yield Problem(f"{section}.optimizer.warmup_steps={optimizer.warmup_steps}", text)
        if not optimizer.is_constant and decay is not None and optimizer.warmup_steps >= decay:
            text = f"leaves no step for the decay, which ends at step {decay}"
            yield Problem(f"{section}.optimizer.warmup_steps={optimizer.warmup_steps}", text)


def ppo_problems(config: Config) -> Iterator[Problem]:
    """Settings of PPO that exclude each other or lack another, and settings of the algorithm that does not run."""
    for section in READ_BY[other_than(config.algorithm)]:
        for key, value in changed(config, section):
            yield Problem(f"{key}={value}", misplaced(key, config.algorithm))
    if config.algorithm == "ppo":
        yield from _loop(config)
        yield from _estimator(config.ppo.adv_estimator)


def _loop(config: Config) -> Iterator[Problem]:
    ppo, penalty = config.ppo, config.loss_fn.reference_policy_kl_penalty
    if ppo.policy_training_start_step >= ppo.max_num_steps:
        text = f"leaves none of the ppo.max_num_steps={ppo.max_num_steps} steps to the policy"
        yield Problem(f"ppo.policy_training_start_step={ppo.policy_training_start_step}", text)
    if ppo.skip_reference_policy_logprobs_calculation and penalty > 0:
        text = (
            f"leaves nothing to compare with, and loss_fn.reference_policy_kl_penalty={penalty:g} has to; set it to 0"
        )
        yield Problem("ppo.skip_reference_policy_logprobs_calculation=True", text)
    if ppo.calculate_advantages_on_gpu and config.cluster.gpus == 0:
        yield Problem("ppo.calculate_advantages_on_gpu=True", "this is a run on CPU: cluster.gpus is 0")


def _estimator(estimator: PPOAdvantageConfig) -> Iterator[Problem]:
    prefix, default = "ppo.adv_estimator", PPOAdvantageConfig()
    if estimator.name == "raw_reward":
        for name in ("gae_lambda", "gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha"):
            value = getattr(estimator, name)
            is_off = name == "length_adaptive_alpha" and not value
            if value != getattr(default, name) and not is_off:
                text = f"has no meaning with {prefix}.name=raw_reward, which takes rewards as they are"
                yield Problem(f"{prefix}.{name}={getattr(estimator, name)}", text)
    elif estimator.length_adaptive_alpha and estimator.gae_lambda_policy is not None:
        text = f"excludes {prefix}.gae_lambda_policy: both say what the policy's lambda is"
        yield Problem(f"{prefix}.length_adaptive_alpha={estimator.length_adaptive_alpha:g}", text)


def report_problems(config: Config) -> Iterator[Problem]:
    """Reports that need a setting that is off."""
    if config.logger.log_completions and config.logger.rollouts == "off":
        text = "needs the rollouts to be written; set logger.rollouts to sample or all"
        yield Problem("logger.log_completions=True", text)


def debug_problems(config: Config) -> Iterator[Problem]:
    """Settings that need the half of the run that is left out."""
    if not config.generates and not config.debug.train:
        text = f"leaves nothing to do beside debug.rollouts_from={config.debug.rollouts_from}; give one of them"
        yield Problem("debug.train=False", text)
    elif not config.generates:
        yield from _without_engines(config)
    elif not config.debug.train:
        yield from _without_policy(config)


def _without_engines(config: Config) -> Iterator[Problem]:
    """Settings that need engines, in a run that reads recorded rollouts."""
    because = "and debug.rollouts_from starts no engine"
    loop, section = config.loop, config.algorithm
    if loop.async_grpo.enabled:
        yield Problem(f"{section}.async_grpo.enabled=True", f"samples ahead, {because}; use false")
    when = {
        f"{section}.val_period={loop.val_period}": loop.val_period > 0,
        f"{section}.val_at_start=True": loop.val_at_start,
        f"{section}.val_at_end=True": loop.val_at_end,
    }
    if config.data.validation and any(when.values()):
        asked = " and ".join(setting for setting, is_on in when.items() if is_on)
        off = "data.val_path=null" if config.data.val_path is not None else "data.val_sets={}"
        key, one = next(iter(config.data.validation.items()))
        yield Problem(f"{key}={one.path}", f"is sampled by {asked}, {because}; use {off}")
    if config.policy.moe.replay_routing:
        text = "needs the experts that engines chose, which recorded rollouts do not have; use false"
        yield Problem("policy.moe.replay_routing=True", text)


def _without_policy(config: Config) -> Iterator[Problem]:
    """Settings that need ranks of the policy, in a run that only samples."""
    because = "and debug.train=false starts no rank of the policy"
    if config.loop.async_grpo.enabled:
        text = f"samples while steps train, {because}; use false"
        yield Problem(f"{config.algorithm}.async_grpo.enabled=True", text)
    if config.checkpointing.resume not in ("auto", "none"):
        text = (
            f"is read by ranks of the policy, {because[4:]}; export the checkpoint (python -m megatron_grpo.export), "
            "and give its folder as policy.model.path"
        )
        yield Problem(f"checkpointing.resume={config.checkpointing.resume}", text)
    if config.generation.server.urls:
        text = f"serves weights that a refit sends, {because}; use engines of the run's own, generation.server.urls=[]"
        yield Problem(f"generation.server.urls={config.generation.server.urls}", text)
    if config.policy.quantization is not None:
        text = f"rounds the weights on their way to the engines, {because}; use null"
        yield Problem(f"policy.quantization={config.policy.quantization}", text)
