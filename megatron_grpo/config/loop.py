"""Checks of what the training loop is asked to do: optimizer steps, dynamic sampling, the reference, early stopping."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config

VALIDATION_PREFIX = "val_"
"""Metrics that only validation produces begin with this."""


def loop_problems(config: Config) -> Iterator[Problem]:
    """Settings of the loop that do not fit together."""
    yield from _optimizer_steps(config)
    yield from _dynamic_sampling(config)
    yield from _reference(config)
    yield from _early_stop(config)


def validates(config: Config) -> bool:
    """Whether a run validates at all."""
    loop = config.loop
    return config.data.val_path is not None and bool(loop.val_period or loop.val_at_start or loop.val_at_end)


def _optimizer_steps(config: Config) -> Iterator[Problem]:
    samples = config.samples_per_step
    for section, model in (("policy", config.policy), ("value", config.value_model)):
        if model is None or model.train_global_batch_samples is None:
            continue
        size, data = model.train_global_batch_samples, model.parallel.data
        subject = f"{section}.train_global_batch_samples={size}"
        if samples % size:
            yield Problem(subject, f"does not divide the {samples} samples of a step (prompts x generations)")
        elif size % data:
            yield Problem(subject, f"does not share out evenly over {section}.parallel.data={data} ranks")


def _dynamic_sampling(config: Config) -> Iterator[Problem]:
    loop = config.loop
    if loop.batch_multiplier != 1 and not loop.use_dynamic_sampling:
        text = "samples prompts that nothing would train on; needs grpo.use_dynamic_sampling=true"
        yield Problem(f"grpo.batch_multiplier={loop.batch_multiplier:g}", text)


def _reference(config: Config) -> Iterator[Problem]:
    if config.loop.sync_ref_model and config.loss_fn.reference_policy_kl_penalty == 0:
        text = "there is no reference policy to move; needs loss_fn.reference_policy_kl_penalty > 0"
        yield Problem("grpo.sync_ref_model=True", text)


def _early_stop(config: Config) -> Iterator[Problem]:
    stop = config.loop.early_stop
    if not stop.enabled:
        return
    if stop.threshold is None and stop.patience is None:
        text = "nothing says when; give grpo.early_stop.threshold or grpo.early_stop.patience"
        yield Problem("grpo.early_stop.enabled=True", text)
    if not stop.metric_name.startswith(VALIDATION_PREFIX):
        text = f"is no validation metric; their names begin with {VALIDATION_PREFIX}, for example val_accuracy"
        yield Problem(f"grpo.early_stop.metric_name={stop.metric_name}", text)
    if config.data.val_path is None or config.loop.val_period == 0:
        text = "decides after a validation; needs data.val_path and grpo.val_period"
        yield Problem("grpo.early_stop.enabled=True", text)
