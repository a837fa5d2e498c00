"""Brief plans before a start: whether a run fits, which keys make it fit, and how long a step takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import silence_packages
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.planning.advice import with_advice
from megatron_grpo.planning.device_memory import GIB
from megatron_grpo.planning.trace import start_trace_pool
from megatron_grpo.planning.whole import Plan, submit_plan
from megatron_grpo.preflight.model_file_checks import explain_unusable_model


def check_fit(config: Config) -> Iterator[Problem]:
    """Yield the remarks of --check on a run's memory and layout.

    Nothing is planned without cluster.gpu, on CPUs, or if the model is not on this machine. Dry runs take seconds to
    minutes, so plan and advice are brief (`submit_plan`).
    """
    if config.cluster.gpu is None or not config.cluster.gpus or not config.debug.train:
        return
    path, subject = config.policy.model.path, f"cluster.gpu={config.cluster.gpu}"
    try:
        plan = _plan_briefly(config)
    except ConfigError as error:
        yield from error.problems
        return
    except (RunError, ValueError) as error:
        yield Problem(subject, f"the run could not be planned: {error}")
        return
    if plan is None:  # a model of the hub need not be downloaded for --check
        yield from [] if is_hub_name(path) else explain_unusable_model(f"policy.model.path={path}", path)
        return
    yield from (Problem(subject, f"does not fit: {text}") for text in plan.problems)
    if not plan.problems:
        peak, available = plan.fullest.peak / GIB, plan.hardware.memory_gib
        yield Problem(subject, f"{plan.verdict}: {peak:.1f} of {available:.1f} GiB, planned in {plan.planned_s:.0f} s")


def describe_plan(config: Config) -> Iterator[str]:
    """Yield whether a run fits and the seconds of a step, a line each."""
    reason = None
    if not config.cluster.gpus or not config.debug.train:
        reason = "plans are of runs that train on GPUs"
    elif config.cluster.gpu is None:
        reason = "cluster.gpu=h100, or another, says on what"
    try:
        plan = None if reason is not None else _plan_briefly(config)
    except (ConfigError, RunError, ValueError) as error:
        reason, plan = str(error), None
    if plan is None:
        yield f"plan: none; {reason or 'the model is not on this machine'}"
        return
    peak, available = plan.fullest.peak / GIB, plan.hardware.memory_gib
    gpus = f"{config.cluster.num_nodes} x {config.cluster.gpus} {plan.hardware.name}"
    reasons = f": {'; '.join(plan.problems)}" if plan.problems else ""
    yield f"plan: {plan.verdict} on {gpus}, {peak:.1f} of {available:.1f} GiB{reasons}"
    if plan.times is not None:
        speed = plan.times.tokens_per_s_per_gpu
        yield f"a step: {plan.times.step_s:.1f} s, {speed:,.0f} tokens a second and GPU"


def _plan_briefly(config: Config) -> Plan | None:
    """Plan a run, with advice; None: its model is not here."""
    shape = find_model_shape(config)
    if shape is None:
        return None
    with silence_packages(), announce_waits(), start_trace_pool() as pool:
        plan = submit_plan(config, shape, pool, brief=True).wait(time.monotonic() + config.plan.timeout_s)
        return with_advice(plan, pool, brief=True)
