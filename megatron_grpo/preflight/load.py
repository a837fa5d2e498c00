"""Check a whole configuration: by itself, against the model, and on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_grpo.cluster.machines import fill_in_address, fill_in_gpus
from megatron_grpo.config.compose import Composed, compose_typed
from megatron_grpo.config.errors import Problem, format_count
from megatron_grpo.config.job import Job
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.data_checks import count_training_rows, read_recorded_max_num_steps
from megatron_grpo.preflight.engine_checks import find_refit_remarks
from megatron_grpo.preflight.machine_checks import examine_machine
from megatron_grpo.preflight.remarks import find_remarks


def summarize_run(config: Config, start_from: Path | None) -> str:
    """A run in one sentence: recipe, algorithm, steps, layouts, and the checkpoint it starts from (None: step 1)."""
    loop, generation = config.training_loop, config.generation.parallel
    algorithm = ("asynchronous " if loop.async_grpo.enabled else "") + config.algorithm.upper()
    samples = f"{loop.num_prompts_per_step} prompts x {loop.num_generations_per_prompt} samples"
    parts = [f"policy on {_ranks(config.policy.parallel)}"] if config.debug.train else ["nothing is trained"]
    if config.value_model is not None and config.debug.train:
        parts.append(f"value model on {_ranks(config.value.parallel)}")
    engines = f"{format_count('engine', generation.data)} of {format_count('rank', generation.ranks_per_engine)}"
    parts.append(engines if config.needs_generation else f"rollouts of {config.debug.rollouts_from}")
    where = f"{config.cluster.num_nodes} x {config.cluster.gpus} GPUs" if config.cluster.gpus else "CPU"
    return (
        f"{config.name}, {algorithm}, up to {loop.max_num_steps} steps of {samples}; {', '.join(parts)}, on "
        f"{where}; {_beginning(config, start_from)}"
    )


def _ranks(parallel: ParallelConfig) -> str:
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "DP": parallel.data}
    layout = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    if parallel.expert > 1:
        layout += f", EP{parallel.expert}"
    return format_count("rank", parallel.world_size) + (f" ({layout})" if layout else "")


def _beginning(config: Config, start_from: Path | None) -> str:
    folder = Path(os.path.abspath(config.run_dir))
    if start_from is None:
        return f"begins in {folder}"
    if folder.resolve() in start_from.resolve().parents:
        return f"goes on after step {start_from.name.removeprefix('step_')} in {folder}"
    return f"begins in {folder} from {start_from}"


_OPEN = 2**31 - 1
"""Placeholder for max_num_steps=-1 until the rows are counted: more steps than any run has."""


def _settle_steps(config: Config) -> Iterator[Problem]:
    """Replace max_num_steps=-1 by the steps of max_num_epochs passes over the rows, or by those of the recorded run.

    The run is shorter if prompts turn out to be too long, or if dynamic sampling takes more prompts for a step.
    """
    if not config.needs_generation:
        config.training_loop.max_num_steps = read_recorded_max_num_steps(config)
    elif config.data.streaming:
        text = "needs rows that can be counted, and they are streamed; give a number of steps"
        yield Problem(f"{config.algorithm}.max_num_steps=-1", text)
    else:
        per_epoch = count_training_rows(config) // config.prompts_per_generation_batch
        config.training_loop.max_num_steps = max(per_epoch * config.training_loop.max_num_epochs, 1)


def check_overrides(overrides: Sequence[str]) -> Composed:
    """Check a command line: the configuration by itself, and if it is correct, its requirements of this machine.

    Args:
        overrides: Hydra's syntax, as on the command line: "+exp=quickstart", "grpo.max_num_steps=3"; and "job=FILE".
    """
    composed = _by_itself(compose_typed(overrides))
    if not composed.problems:
        problems, found = _of_machine(composed.require())
        composed.problems, composed.remarks = composed.rename_problems(problems), composed.rename_problems(found)
    return composed


def check_config(config: Config) -> Composed:
    """Check a configuration that a script made, as `check_overrides` checks that of a command line."""
    checked = Composed(Job(), config, asdict(config), _problems(config))
    if not checked.problems:
        checked.problems, checked.remarks = _of_machine(config)
    return checked


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration of a run that can start on this machine, from overrides as `check_overrides` takes them.

    Raises:
        ConfigError: names every problem of the configuration, and of the machine's files and GPUs.
    """
    return check_overrides(overrides).require()


def compose_config(overrides: Sequence[str]) -> Config:
    """The configuration, checked by itself: names, types, ranges, layout and batch arithmetic, but no file and no GPU.

    Raises:
        ConfigError: names every problem.
    """
    return _by_itself(compose_typed(overrides)).require()


def compose_for_search(overrides: Sequence[str]) -> Config:
    """As `compose_config`, except for problems of the layouts, in whose place a search puts others.

    Raises:
        ConfigError: names every other problem.
    """
    composed = _by_itself(compose_typed(overrides))
    composed.problems = [problem for problem in composed.problems if not _is_of_layouts(problem)]
    return composed.require()


def _is_of_layouts(problem: Problem) -> bool:
    """Whether a problem is one of the sizes of layouts, or of all their GPUs together."""
    sizes = ("policy.parallel.", "generation.parallel", "cluster.gpus_per_node=")
    return problem.subject.startswith(sizes) or "policy.parallel.data=" in problem.text


def _of_machine(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Problems of this machine, and remarks on the run; sets max_num_steps if it was -1."""
    problems, found = examine_machine(config)
    if not problems and config.training_loop.max_num_steps == _OPEN:
        problems += _settle_steps(config)
    return problems, [*find_remarks(config), *find_refit_remarks(config), *found]


def _by_itself(composed: Composed) -> Composed:
    if composed.config is not None:
        composed.problems += [
            problem
            for problem in _problems(composed.config)
            if problem.key not in composed.problem_keys and not any(key in problem.text for key in composed.defaulted)
        ]
    composed.problems = composed.rename_problems(composed.problems)
    return composed


def _problems(config: Config) -> list[Problem]:
    """Problems of a configuration by itself and against its model."""
    fill_in_address(config.cluster)
    fill_in_gpus(config.cluster)
    if config.training_loop.max_num_steps == -1:
        config.training_loop.max_num_steps = _OPEN
    return find_problems(config, find_model_shape(config))
