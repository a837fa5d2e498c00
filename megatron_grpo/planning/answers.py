"""Answers the command plan: composes the run, plans or calibrates, and prints the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import FAILED, silence_packages
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import split_trust
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.planning.advice import with_advice
from megatron_grpo.planning.calibrate import fit_hardware, read_measurements, write_profile
from megatron_grpo.planning.device_memory import GIB
from megatron_grpo.planning.operation import describe_checkpoints, describe_start
from megatron_grpo.planning.page import write_page
from megatron_grpo.planning.policy_layouts import list_overrides, name_layout
from megatron_grpo.planning.search import Search, compose_for_search, search_layouts
from megatron_grpo.planning.trace import start_trace_pool
from megatron_grpo.planning.whole import Plan, find_fp8_problems, find_profile, submit_plan
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.machine_checks import find_missing_libraries
from megatron_grpo.preflight.model_file_checks import explain_unusable_model
from megatron_grpo.run.directory import load_run_config

_MAX_LISTED = 8  # layouts of each kind


def plan_run(overrides: Sequence[str], options: Mapping[str, Any]) -> int:
    """Print the plan of a run; returns the exit code."""
    # A search replaces the layouts, so it may begin with a configuration whose layouts are wrong.
    config, shape = _load_config(overrides, compose_for_search if "search" in options else compose_config)
    plan, layouts = None, None
    with silence_packages(), announce_waits(), start_trace_pool() as pool:
        if "search" in options:
            layouts = search_layouts(config, shape, pool, budget_s=config.plan.search_s)
            plan = layouts.best[0].plan if layouts.best else None
        else:
            plan = submit_plan(config, shape, pool).wait(time.monotonic() + config.plan.timeout_s)
            plan = with_advice(plan, pool)
    if "json" in options:
        result = plan if layouts is None else layouts
        print(json.dumps(None if result is None else result.as_dict(), indent=1))
    else:
        print("\n".join([*(_format_search(layouts) if layouts else ()), *(_format_plan(plan) if plan else ())]))
    if "html" in options and plan is not None:
        write_page(options["html"], plan)
    return 0 if plan is not None and not plan.problems else FAILED


def _format_plan(plan: Plan) -> Iterator[str]:
    fullest, config, capacity_gib = plan.fullest, plan.config, plan.hardware.memory_gib
    yield (
        f"{config.name} on {config.cluster.num_nodes} x {config.cluster.gpus} {plan.hardware.name}: {plan.verdict}; "
        f"the fullest GPU takes {fullest.peak / GIB:.1f} of {capacity_gib:.1f} GiB"
    )
    yield from (f"  {problem}" for problem in plan.problems)
    yield ""
    ranks = plan.all_ranks
    names = list(dict.fromkeys(name for rank in ranks for name in rank.phases))
    yield "tensors in GiB  layers  experts  " + "".join(f"{name:>12}" for name in names) + "     reserve        peak"
    for rank in ranks:
        sizes = "".join(f"{rank.phases[name] / GIB:12.2f}" if name in rank.phases else " " * 12 for name in names)
        skew = f"x {rank.expert_skew:g}" if plan.shape.experts is not None else ""
        yield (
            f"{rank.model.split()[0]:>6} stage {rank.stage:<3}{rank.layers:6}  {skew:>7}  {sizes}"
            f"{rank.reserve / GIB:12.2f}{rank.peak / GIB:12.2f}"
        )
    yield ""
    owner = "" if fullest.model == "policy" else f" of the {fullest.model}"
    yield f"largest tensors at the peak of stage {fullest.stage}{owner}, in {fullest.phase}:"
    for holder in fullest.holders[:6]:
        per_layer = holder.bytes_per_layer
        layers = f", {per_layer / GIB:.3f} for each of {holder.layers} layers" if per_layer else ""
        yield f"  {holder.bytes / GIB:7.2f} GiB  {holder.kind}{layers}"
    yield ""
    if plan.times is not None:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.times.phase_s.items())
        alternative = "" if plan.times.asynchronous_s is None else f" ({plan.times.synchronous_s:.1f} s if synchronous)"
        speed = f"{plan.times.tokens_per_s_per_gpu:,.0f} tokens a second and GPU"
        yield f"a step: {plan.times.step_s:.1f} s{alternative}, {speed}"
        yield f"  seconds by phase: {phases}"
        yield from (f"  {limit}" for limit in plan.times.limits)
        if plan.checkpoints is not None:
            yield from describe_checkpoints(config, plan.checkpoints)
        yield describe_start(config, plan.shape)
        yield ""
    yield from (f"assumed: {assumption}" for assumption in plan.assumptions)
    yield f"planned in {plan.planned_s:.0f} s"


def _format_search(search: Search) -> Iterator[str]:
    ran, note = len(search.best) + len(search.failed), f" ({search.why_not_all})" if search.why_not_all else ""
    fitting = f"{len(search.best)} layouts fit" if search.best else "no layout fits"
    yield f"{fitting}: policy on {search.gpus[0]} GPUs, engines on {search.gpus[1]}, {search.idle} idle{note}"
    yield (
        f"{search.legal} legal layouts: {search.too_large} exceed a GPU with their weights, gradients and optimizer "
        f"state alone (the smallest has {search.least_gib:.1f} GiB of them), {ran} ran dry in {search.searched_s:.0f} "
        f"s, {search.skipped} have slower estimates or keep more on a rank than one that does not fit"
    )
    if ran:
        yield "     step s  tokens/s/GPU  peak GiB  layout"
    for number, trial in enumerate(search.best[:_MAX_LISTED], start=1):
        assert trial.plan is not None
        assert trial.plan.times is not None
        times, name = trial.plan.times, name_layout(trial.candidate.config)
        reason = f"  ({trial.reason})" if trial.reason else ""
        peak = trial.plan.fullest.peak / GIB
        yield f"{number:3}{times.step_s:9.1f}{times.tokens_per_s_per_gpu:14,.0f}{peak:10.1f}  {name}{reason}"
    yield from (f"  -  {name_layout(trial.candidate.config)}: {trial.reason}" for trial in search.failed[:_MAX_LISTED])
    if search.best:
        yield "the first one: " + " ".join(list_overrides(search.best[0].candidate.config))
    yield ""


def fit_profile(words: Sequence[str], file: Path | None) -> int:
    """Fit a profile to the run in a folder, and write it."""
    folders = [Path(word) for word in words if "=" not in word]
    if len(folders) != 1:
        raise ValueError("calibrate takes one RUN_DIR, the folder of a run that recorded its rollouts")
    (run_dir,) = folders
    is_trusted, overrides = split_trust([word for word in words if "=" in word])
    for override in overrides:
        if override.partition("=")[0] not in ("cluster.gpu", "policy.model.path"):
            raise ValueError(f"{override}: calibrate takes cluster.gpu, policy.model.path and trust_run")
    sections = ("policy.", "loss_fn.", "generation.engine_args.")  # what a dry run imports
    config = load_run_config(run_dir, overrides, is_trusted=is_trusted, sections=sections)
    # With the lengths that the run recorded, plan and run differ by the profile alone.
    config.plan.lengths_from = str(run_dir)
    shape, path = find_model_shape(config), config.policy.model.path
    if shape is None:
        text = "is not on this machine; give a folder with its config.json"
        subject = f"policy.model.path={path}"
        problems = [] if is_hub_name(path) else list(explain_unusable_model(subject, path))
        raise ConfigError(problems or [Problem(subject, text)])
    if not config.cluster.gpus:
        raise ValueError(f"{run_dir} is a run on CPU; profiles are of GPUs")
    measured = read_measurements(run_dir)
    with start_trace_pool() as pool:
        plan = submit_plan(config, shape, pool).wait(time.monotonic() + config.plan.timeout_s)
    tensors = max(rank.phases[rank.phase] for rank in plan.ranks) / GIB
    calibration = fit_hardware(measured, plan.time_on, plan.hardware, tensors)
    print("\n".join(calibration.render_table()))
    file = file or Path(f"{plan.hardware.name}_calibrated.yaml")
    write_profile(file, calibration.hardware, f"{plan.hardware.name}_calibrated")
    print(f"wrote {file}; use it as plan.hardware={file}")
    return 0


def _load_config(overrides: Sequence[str], compose: Callable[[Sequence[str]], Config]) -> tuple[Config, ModelShape]:
    """Load the configuration of a command line, and the model's sizes."""
    if "plan.workload=pretrain" in overrides:
        # A plain training step has no engines, which would take GPUs; a run without them reads a recording, and
        # validates nothing.
        overrides = [*overrides, "debug.rollouts_from=none", "data.val_path=null"]
    config = compose(overrides)
    problems = [*find_missing_libraries(trains=True, samples=False), *find_fp8_problems(config, find_profile(config))]
    if problems:
        raise ConfigError(problems)
    if not config.cluster.gpus:
        raise ConfigError([Problem("cluster.gpus_per_node=0", "is a run on CPU; give the GPUs of a node")])
    if not config.debug.train:
        raise ConfigError([Problem("debug.train=False", "trains nothing, so there is nothing to plan; use true")])
    shape, path = find_model_shape(config), config.policy.model.path
    if shape is None:
        problems = list(explain_unusable_model(f"policy.model.path={path}", path))
        if problems:
            raise ConfigError(problems)
        config = compose(overrides)  # downloaded just now: its checks against the model are still due
        shape = find_model_shape(config)
        assert shape is not None, "a usable model has a shape"
    return config, shape
