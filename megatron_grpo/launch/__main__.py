"""Launches a run and looks after it: python -m megatron_grpo.launch slurm +exp=quickstart"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.errors import RunError, suggest_name
from megatron_grpo.config.overrides import OPTION
from megatron_grpo.config.section import NonNegative, Positive
from megatron_grpo.launch.background import LocalTarget
from megatron_grpo.launch.kubernetes import KubernetesTarget
from megatron_grpo.launch.launch_request import load_request
from megatron_grpo.launch.ray_jobs import RayTarget
from megatron_grpo.launch.slurm import SlurmTarget
from megatron_grpo.launch.state import describe_run
from megatron_grpo.launch.target import (
    Launch,
    Target,
    find_log,
    make_launch_folder,
    print_files,
    read_launch,
    record_launch,
)
from megatron_grpo.observability.run_files import write_text
from megatron_grpo.run.directory import STOP_FILE, is_alive

USAGE = """\
python -m megatron_grpo.launch TARGET +exp=NAME [key=value ...] [--spares K] [--dry-run]
python -m megatron_grpo.launch status|logs|stop RUN_DIR [-f] [--process NAME] [--lines N] [--now]

  TARGET       slurm, kubernetes (a RayJob of KubeRay), ray (a cluster that runs, by its job server), or local (this
               machine, in the background)
  +exp=NAME    a recipe, and keys of it to change, as for megatron_grpo.train; launch.* are those of the launch itself:
               --help launch
  --spares K   nodes more than the run needs, which replace those that fail their check: launch.spares=K
  --dry-run    print what would be submitted, and stop
  status       the job, the step, processes that are silent, how the run ended
  logs         the end of the driver's output; -f, --follow: and what is added; --lines N (50); --process policy.3,
               engine.0, driver: the log of this process
  stop         let the run save after its step and end; a job that waits is cancelled; --now: end it at once

Checks the run as megatron_grpo.train --check does, says whether it fits its GPUs and how long a step takes (with
cluster.gpu), submits it, and writes what it submitted into RUN_DIR/launch. A run_dir of an earlier launch resumes.
"""
_TARGETS: tuple[Target, ...] = (SlurmTarget(), KubernetesTarget(), RayTarget(), LocalTarget())
TARGETS = {target.name: target for target in _TARGETS}
_LAUNCH_OPTIONS: dict[str, Any] = {"--dry-run": bool, "--spares": NonNegative}
_ACTION_OPTIONS: dict[str, Any] = {"--follow": bool, "--process": str, "--lines": Positive, "--now": bool}


@as_command("launch", USAGE, failures=(RunError,))
def main(arguments: Sequence[str]) -> int:
    """Launch a run, or look after one; return the exit code."""
    actions: dict[str, Callable[[Path, dict[str, Any]], int]] = {"status": _show, "logs": _print_log, "stop": _stop}
    word, *remaining = arguments or [""]
    if word in TARGETS:
        parsed = parse_arguments(
            remaining, _LAUNCH_OPTIONS, is_override=lambda name: name == OPTION or not name.startswith("-")
        )
        spares = [f"launch.spares={parsed.options['spares']}"] if "spares" in parsed.options else []
        return _launch(TARGETS[word], [*parsed.overrides, *spares], is_dry="dry_run" in parsed.options)
    if word not in actions:
        raise ValueError(f"{word or 'nothing'} is not a target{suggest_name(word, [*TARGETS, *actions])}")
    written = ["--follow" if argument == "-f" else argument for argument in remaining]
    parsed = parse_arguments(written, _ACTION_OPTIONS, most_words=1)
    if not parsed.words or not Path(parsed.words[0]).is_dir():
        raise ValueError(f"{word} {' '.join(parsed.words) or 'nothing'}: give the folder of a run")
    return actions[word](Path(parsed.words[0]), parsed.options)


def _launch(target: Target, overrides: Sequence[str], *, is_dry: bool) -> int:
    """Check a run, and submit or print it."""
    request = load_request(overrides, target.reach, target.find_problems)
    from megatron_grpo.planning.check import describe_plan  # here, because it imports torch

    for line in describe_plan(request.config):
        print(line, file=sys.stderr, flush=True)
    text = target.render(request)
    if is_dry:
        print(text, end="")
        return 0
    run_dir = request.local_run_dir
    if target.reach != "nothing" and is_alive(run_dir):
        raise ValueError(f"run_dir={run_dir} is in use by a run that is alive; stop it first, or choose another")
    file = make_launch_folder(run_dir) / target.file_name
    write_text(file, text)
    launch = target.submit(request, file)
    record_launch(launch)
    print(f"{target.name} job {launch.job}: {run_dir}")
    return 0


def _show(run_dir: Path, options: dict[str, Any]) -> int:
    """Print the state of a run and of its job."""
    launch = read_launch(run_dir)
    if launch is not None:
        print(f"{launch.target}, since {launch.submitted}: {_find_target(launch).describe(launch)}")
    runs = [run_dir] if launch is None else launch.runs
    for folder in runs:
        prefix = f"{folder.name}: " if len(runs) > 1 else ""
        print(*(f"{prefix}{line}" for line in describe_run(folder)), sep="\n")
    return 0


def _print_log(run_dir: Path, options: dict[str, Any]) -> int:
    """Print the output of a run, or the log of a process."""
    process, lines, follow = options.get("process"), options.get("lines", 50), "follow" in options
    launch = read_launch(run_dir)
    if launch is None:
        return print_files([find_log(run_dir, process or "driver")], lines, follow)
    return _find_target(launch).print_log(launch, process, lines, follow)


def _stop(run_dir: Path, options: dict[str, Any]) -> int:
    """End a run, after its step or at once."""
    launch = read_launch(run_dir)
    if launch is None and ("now" in options or not is_alive(run_dir)):
        raise ValueError(f"{run_dir} was not started by launch, or is not alive; end its driver, {run_dir}/logs")
    if launch is None:
        (run_dir / STOP_FILE).touch()
        print(f"{run_dir} will end after the step that it is in, with a checkpoint")
    elif "now" in options:
        _find_target(launch).cancel(launch)
        print(f"{launch.target} job {launch.job} is cancelled")
    else:
        print(_find_target(launch).stop(launch))
    return 0


def _find_target(launch: Launch) -> Target:
    if launch.target not in TARGETS:
        raise ValueError(f"{launch.run_dir} was launched to {launch.target}, which this version does not know")
    return TARGETS[launch.target]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
