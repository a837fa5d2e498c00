"""The command line of `python -m megatron_grpo.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import yaml

from megatron_grpo.algorithms.dispatch import run_algorithm
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import FAILED, MISTAKE, answer_help, report_interruption
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.help import format_help
from megatron_grpo.config.hiding import hide_values
from megatron_grpo.config.keys import find_key, is_section
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.outside_text import replace_controls
from megatron_grpo.config.overrides import OPTION
from megatron_grpo.config.schema import Config
from megatron_grpo.config.suggestions import describe_counterpart
from megatron_grpo.models.source import find_local_folder, is_prepared
from megatron_grpo.preflight.load import check_overrides, summarize_run
from megatron_grpo.preflight.model_file_checks import has_tokenizer
from megatron_grpo.run.checkpoints import Checkpointer, find_start_checkpoint
from megatron_grpo.run.directory import compare_data


@tolerant_output(of_run=True)
def main(arguments: Sequence[str]) -> int:
    """Run a command line; return the exit code."""
    try:
        if {"-h", "--help", "--version"} & set(arguments):
            answer_help(arguments, format_help())
            return 0
        return _run_task(*_read_options(arguments))
    except ConfigError as error:
        print(replace_controls(str(error)), file=sys.stderr)
        return MISTAKE
    except RunError as error:
        print(replace_controls(f"run failed: {error}"), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as error:
        return report_interruption(error)


def _run_task(overrides: Sequence[str], task: str) -> int:
    """Train, check or show the configuration, as `task` says; return the exit code."""
    with announce_waits(), phase("checking the configuration, the data and this machine"):
        checked = check_overrides(overrides)
    if task == "show" and checked.values:
        print(yaml.safe_dump(hide_values(checked.values), sort_keys=False, allow_unicode=True), end="")
    # A run can be planned for GPUs and files that this machine lacks.
    planned = checked.config if task == "check" and not checked.conflicts else None
    if planned is not None and planned.cluster.gpu is not None:
        from megatron_grpo.planning.check import check_fit  # here, because NumPy takes long to import

        for remark in check_fit(planned):
            print(replace_controls(f"{remark.subject} {remark.text}"), flush=True)
    config = checked.require()
    for remark in [] if task == "show" else checked.remarks:
        print(replace_controls(f"{remark.subject} {remark.text}"), flush=True)
    if task == "check":
        with announce_waits(), phase("trying the parts of a start"):
            start_from = check_start(config)
        print(f"configuration is fine: {summarize_run(config, start_from)}")
    elif task == "train":
        run_algorithm(config)
    return 0


def check_start(config: Config, output: TextIO | None = None) -> Path | None:
    """Make the further checks of a start; return its checkpoint.

    `output`: stream of the remarks; None: standard output.

    ConfigError: an environment cannot be created, the checkpoint is damaged or has other LoRA adapters, or too few
    prompts are short enough.
    """
    # Imported here, because NumPy takes long to import; torch, below, too.
    from megatron_grpo.preflight.environment_checks import check_user_code

    for problem in check_user_code(config):
        print(replace_controls(f"{problem.subject} {problem.text}"), file=output, flush=True)
    for remark in compare_data(Path(config.run_dir), config):  # a start prints them among the changes
        print(remark, file=output, flush=True)
    checkpointer = Checkpointer(Path(config.run_dir), config.checkpointing, look_only=True)
    start_from = find_start_checkpoint(checkpointer, config)
    folder = find_local_folder(config.policy.model.path)
    if config.reads_prompts and not is_prepared(config) and folder is not None and has_tokenizer(folder):
        from megatron_grpo.preflight.conversation_checks import load_examined_prompts

        for note in load_examined_prompts(config, folder).notes:
            print(note, file=output, flush=True)
    return start_from


def _read_options(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Split a command line into overrides and the task: train, check or show."""
    overrides: list[str] = []
    problems: list[Problem] = []
    task = "train"
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if name in ("--cfg", "-c"):
            value = value or (remaining.pop(0) if remaining else "")
            if value != "job":
                problems.append(Problem(f"{name} {value}".strip(), "prints only the configuration: --cfg job"))
            task = "show"
        elif argument == "--check":
            task = "check"
        elif name == OPTION:
            overrides.append(f"{OPTION}={value or (remaining.pop(0) if remaining else '')}")
        elif argument.startswith("-"):
            key = name.lstrip("-").replace("-", "_")
            advice = describe_counterpart(name, "grpo") or describe_counterpart(key, "grpo")
            if advice is None and (find_key(key) or is_section(key)):
                advice = f"keys have no dashes before them: {key}=..."
            problems.append(Problem(argument, f"no such option; {advice or '--help shows what there is'}"))
            # Skip the values of an unknown option, so that they are not reported as well.
            while not equals and remaining and "=" not in remaining[0] and not remaining[0].startswith("-"):
                remaining.pop(0)
        else:
            overrides.append(argument)
    if problems:
        raise ConfigError(problems)
    return overrides, task
