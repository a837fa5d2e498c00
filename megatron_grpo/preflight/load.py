"""Composes a configuration and checks it: by itself, against the model, on this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.machines import fill_in_address, fill_in_gpus
from megatron_grpo.config.compose import ComposedConfig, compose_typed
from megatron_grpo.config.data_schema import is_model_folder
from megatron_grpo.config.errors import ConfigError, Problem, format_count
from megatron_grpo.config.job import Job
from megatron_grpo.config.keys import build_values
from megatron_grpo.config.loop_names import translate_key
from megatron_grpo.config.overrides import is_composition
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.config.started_values import split_trust
from megatron_grpo.models.source import adopt_families, find_model_shape
from megatron_grpo.platform.hardware import find_hardware
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.data_checks import count_training_rows, read_recorded_max_num_steps
from megatron_grpo.preflight.machine_checks import Reach, examine_machine
from megatron_grpo.preflight.refit_memory import find_refit_remarks, find_routed_remarks
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.run.checkpoints import Checkpointer, resolve_checkpoint
from megatron_grpo.run.directory import CONFIG_FILE, load_run_config

RUN_DIR = "run_dir="
# Sections of the configuration that a run reads.
_RUN_SECTIONS = tuple(field.name for field in dataclasses.fields(Config) if field.name != "launch")
# Placeholder for max_num_steps=-1 until the rows are counted: more steps than any run has.
_UNCOUNTED_STEPS = 2**31 - 1


def summarize_run(config: Config, start_from: Path | None) -> str:
    """Describe a run in one sentence; `start_from`: its checkpoint, None: step 1."""
    loop, generation = config.loop, config.generation.parallel
    algorithm = ("asynchronous " if config.async_sampling.enabled else "") + config.method.name.upper()
    samples = f"{loop.num_prompts_per_step} prompts x {loop.num_generations_per_prompt} samples"
    samples = f"{loop.num_prompts_per_step} rows" if config.method.rows else samples
    parts = [f"policy on {_describe_ranks(config.policy.parallel)}"] if config.debug.train else ["nothing is trained"]
    if config.value_model is not None and config.debug.train:
        parts.append(f"value model on {_describe_ranks(config.value.parallel)}")
    if config.debug.train:
        for section, teacher in config.teacher_models.items():
            parts.append(f"{section} on {_describe_ranks(teacher.parallel)}")
    engines = f"{format_count('engine', generation.data)} of {format_count('rank', generation.ranks_per_engine)}"
    if config.needs_generation:
        parts.append(engines)
    elif not config.reads_prompts:
        parts.append(f"rollouts of {config.debug.rollouts_from}")
    devices = f"{config.cluster.num_nodes} x {config.cluster.gpus} GPUs" if config.cluster.gpus else "CPU"
    folder = Path(os.path.abspath(config.run_dir))
    if start_from is None:
        start = f"begins in {folder}"
    elif folder.resolve() in start_from.resolve().parents:
        start = f"goes on after step {start_from.name.removeprefix('step_')} in {folder}"
    else:
        start = f"begins in {folder} from {start_from}"
    text = f"{config.name}, {algorithm}, up to {loop.max_num_steps} steps of {samples}; {', '.join(parts)},"
    text += f" on {devices}; {start}"
    return text


def _describe_ranks(parallel: ParallelConfig) -> str:
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "DP": parallel.data}
    layout = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    if parallel.expert > 1:
        layout += f", EP{parallel.expert}"
    return format_count("rank", parallel.world_size) + (f" ({layout})" if layout else "")


def check_overrides(
    overrides: Sequence[str], rewards: Mapping[str, Callable[..., Any]] | None = None, reach: Reach = "machine"
) -> ComposedConfig:
    """Check the configuration of a command line, and this machine.

    Args:
        overrides: as on the command line, "+exp=quickstart", "grpo.max_num_steps=3" or "job=FILE".
        rewards: reward functions passed by a script, by their entry in reward_funcs.
        reach: what of this machine the run will meet.
    """
    if (run_dir := find_recorded_run(overrides)) is not None:
        return _check_resume(run_dir, overrides, reach)
    composed = _compose(overrides)
    # After a wrong name or value, settings are not what was meant, and their files are not examined.
    is_as_meant = not composed.problems
    _check_settings(composed, reach)
    if is_as_meant and reach != "nothing":
        _check_machine(composed, rewards or {}, reach)
    return composed


def find_recorded_run(overrides: Sequence[str]) -> Path | None:
    """Find the folder of the run that a command line without a recipe resumes."""
    names = [override.partition("=")[0] for override in overrides]
    if any(is_composition(name) or name.startswith(("~", "job")) for name in names):
        return None
    folders = [
        Path(os.path.expanduser(override.partition("=")[2])) for override in overrides if override.startswith(RUN_DIR)
    ]
    return folders[-1] if folders and os.path.isfile(folders[-1] / CONFIG_FILE) else None


def _check_resume(run_dir: Path, overrides: Sequence[str], reach: Reach) -> ComposedConfig:
    """Check the configuration of a run's last start, with changes."""
    changes = [override for override in overrides if not override.startswith(RUN_DIR)]
    try:
        is_trusted, changes = split_trust(changes)
        # Only jobs elsewhere read what was recorded of a launch.
        sections = _RUN_SECTIONS if reach == "machine" else ("",)
        config = load_run_config(run_dir, changes, is_trusted=is_trusted, sections=sections)
    except ValueError as error:
        return ComposedConfig(Job(), problems=_list_problems(error, f"{RUN_DIR}{run_dir}"))
    config.run_dir = str(run_dir)
    # Remarks are about the new changes alone: the last start printed those about the recorded keys.
    checked = check_config(config, {translate_key("grpo", change.partition("=")[0]) for change in changes}, reach)
    text = f"resumes with the configuration of its last start, {run_dir / CONFIG_FILE}"
    changed = f", and {' '.join(changes)}" if changes else ", unchanged"
    checked.remarks.insert(0, Problem(f"{RUN_DIR}{run_dir}", text + changed))
    return checked


def check_config(config: Config, user_keys: set[str] | None = None, reach: Reach = "machine") -> ComposedConfig:
    """Check a configuration that a script made, and this machine."""
    checked = ComposedConfig(Job(), config, build_values(config), adopt_families(config), user_keys=user_keys)
    if not checked.problems:
        _check_settings(checked, reach)
        if reach != "nothing":
            _check_machine(checked, {}, reach)
    return checked


def load_config(overrides: Sequence[str]) -> Config:
    """Load the configuration of a run that can start on this machine.

    `overrides`: as on the command line, "+exp=quickstart", "grpo.max_num_steps=3" or "job=FILE".

    ConfigError: names every problem of the configuration, and of the machine's files and GPUs.
    """
    return check_overrides(overrides).require()


def compose_config(overrides: Sequence[str]) -> Config:
    """Load a configuration, checked without files and GPUs; ConfigError names every problem."""
    return compose_checked(overrides).require()


def compose_checked(overrides: Sequence[str]) -> ComposedConfig:
    """Check the configuration of a command line, without files and GPUs."""
    composed = _compose(overrides)
    _check_settings(composed)
    return composed


def _compose(overrides: Sequence[str]) -> ComposedConfig:
    """Compose a command line, and import its families of models."""
    composed = compose_typed(overrides)
    if composed.config is not None:
        composed.add_problems(adopt_families(composed.config))
    return composed


def _check_settings(composed: ComposedConfig, reach: Reach = "machine") -> None:
    """Add problems of settings beside each other and the model."""
    config = composed.config
    if config is not None:
        if reach == "machine":
            fill_in_address(config.cluster)
            fill_in_gpus(config.cluster)
        if config.loop.max_num_steps == -1:
            config.loop.max_num_steps = _UNCOUNTED_STEPS
        # A wrong value has been replaced by its default, whose problems are not the user's.
        composed.problems += [
            problem
            for problem in [*_resolve_checkpoints(config), *find_problems(config, find_model_shape(config))]
            if problem.key not in composed.problem_keys and not any(key in problem.text for key in composed.defaulted)
        ]
    composed.conflicts = composed.problem_keys
    composed.problems = composed.rename_problems(composed.problems)


def _check_machine(checked: ComposedConfig, rewards: Mapping[str, Callable[..., Any]], reach: Reach) -> None:
    """Add problems and remarks of the machine; settles max_num_steps=-1.

    The steps follow from max_num_epochs, or from the recorded run.
    """
    config = checked.config
    assert config is not None
    # Wrong settings of the rows would show again in each row.
    reads_rows = not any(key.startswith(("data.", "env.")) for key in checked.conflicts)
    problems, remarks = examine_machine(config, reads_rows=reads_rows, reach=reach)
    checked.add_problems(problems)
    if checked.problems and reads_rows:
        # Without other problems the start looks for these; it takes longer, and imports the user's code.
        from megatron_grpo.preflight.environment_checks import find_user_code_problems

        checked.add_problems(find_user_code_problems(config, rewards))
    loop = config.loop
    if not checked.problems and loop.max_num_steps == _UNCOUNTED_STEPS:
        if not config.reads_prompts:
            loop.max_num_steps = read_recorded_max_num_steps(config)
        elif config.data.streaming:
            text = "needs rows that can be counted, and they are streamed; give a number of steps"
            checked.add_problems([Problem(f"{config.loop_name}.max_num_steps=-1", text)])
        else:
            # The run is shorter if prompts are too long, or if dynamic sampling takes more prompts for a step.
            per_epoch = count_training_rows(config) // config.prompts_per_generation_batch
            loop.max_num_steps = max(per_epoch * loop.max_num_epochs, 1)
    if checked.conflicts:  # remarks on memory are for layouts that fit the model
        return
    shape = find_model_shape(config)
    memory_remarks = [*find_refit_remarks(config, shape, find_hardware(config)), *find_routed_remarks(config, shape)]
    checked.remarks = checked.rename_problems([*find_remarks(config, checked.user_keys), *memory_remarks, *remarks])


def _resolve_checkpoints(config: Config) -> Iterator[Problem]:
    """Replace names such as RUN_DIR/checkpoints/best by the checkpoints that they stand for."""
    models: dict[str, Any] = {"policy": config.policy.model, "value": config.value.model}
    models |= {section: teacher.model for section, teacher in config.named_teachers.items()}
    settings: list[tuple[str, Any, Any]] = [
        (f"{name}.model.path", vars(model), "path") for name, model in models.items()
    ]
    settings.append(("checkpointing.resume", vars(config.checkpointing), "resume"))
    for task, environment in config.env.items():
        paths = environment.reward_funcs
        settings += [(f"env.{task}.reward_funcs", paths, n) for n, path in enumerate(paths) if is_model_folder(path)]
    for key, values, name in settings:
        path = values[name]
        try:
            if path is not None and (resolved := resolve_checkpoint(Path(path), key)) != Path(path):
                values[name] = str(resolved)
        except ValueError as error:
            # A run that has checkpoints goes on from its own, also when the one that it began with is gone.
            if name != "resume" or not Checkpointer(Path(config.run_dir), config.checkpointing).list_steps():
                yield from _list_problems(error, f"{key}={path}")


def _list_problems(error: ValueError, subject: str) -> list[Problem]:
    if isinstance(error, ConfigError):
        return list(error.problems)
    return [Problem(subject, str(error).removeprefix(f"{subject}: "))]
