"""Checks the command line of a launch as `train` does, and forecasts its memory and time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.command import check_start
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.outside_text import replace_controls
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.layout_checks import count_engine_gpus, count_gpus
from megatron_grpo.preflight.load import RUN_DIR, check_overrides
from megatron_grpo.preflight.machine_checks import Reach
from megatron_grpo.preflight.rules import Rule, evaluate_rules


@dataclass(frozen=True, slots=True)
class Request:
    """A run to launch, whose configuration has passed its checks.

    Example: `launch slurm +exp=quickstart run_dir=outputs/mine` in /home/me
        Request(config, arguments=("+exp=quickstart",), run_dir="outputs/mine", folder=Path("/home/me"))
    """

    config: Config
    arguments: tuple[str, ...]
    """Arguments of `train`, without run_dir."""
    run_dir: str
    """Folder of the run, as it was given; a relative one begins where the job starts."""
    folder: Path
    """Folder in which launch was called."""

    @property
    def local_run_dir(self) -> Path:
        """Folder on this machine with the record of the launch."""
        return self.folder / self.run_dir

    @property
    def python(self) -> str:
        """Interpreter of the job."""
        launch = self.config.launch
        return launch.python or ("python3" if launch.image is not None else sys.executable)

    @property
    def command(self) -> list[str]:
        """The command of the driver."""
        return [self.python, "-P", "-m", "megatron_grpo.train", f"{RUN_DIR}{self.run_dir}", *self.arguments]


def load_request(
    overrides: Sequence[str], reach: Reach, find_problems: Callable[[Config], Iterator[Problem]]
) -> Request:
    """Check the run of a command line; prints remarks on standard error.

    Args:
        overrides: arguments of `train`.
        reach: what of this machine the job will meet.
        find_problems: finds what is wrong with the launch itself.

    Raises:
        ConfigError: names every problem of the configuration, of the launch and of what the job will meet here.
    """
    checked = check_overrides(overrides, reach=reach)
    if checked.config is not None:
        checked.add_problems([*_find_group_problems(checked.config), *find_problems(checked.config)])
        if reach != "machine" and checked.config.cluster.gpus_per_node is None:
            text = "is needed: the GPUs of each node of the job, 0 for CPUs; those of this machine may be others"
            checked.add_problems([Problem("cluster.gpus_per_node=null", text)])
    config = checked.require()
    for remark in checked.remarks:
        print(replace_controls(f"{remark.subject} {remark.text}"), file=sys.stderr)
    # A container has packages that the user's code may need, and this machine may not.
    if reach == "machine" or (reach == "files" and config.launch.image is None):
        check_start(config, sys.stderr)
    arguments = tuple(override for override in overrides if not override.startswith(RUN_DIR))
    return Request(config, arguments, config.run_dir, Path.cwd())


@evaluate_rules
def _find_group_problems(config: Config) -> Iterator[Rule]:
    """Check that training and engines fit the nodes of their own."""
    launch, cluster = config.launch, config.cluster
    generation = launch.generation_nodes
    yield len({*launch.seeds}) < len(launch.seeds), "launch.seeds=", "has a seed twice"
    if generation is None:
        return
    text = "gives engines nodes of their own, and generation.placement=colocated shares those of training"
    yield config.generation.is_colocated, "launch.generation_nodes=", text
    text = f"leaves none of cluster.num_nodes={cluster.num_nodes} for training"
    yield generation >= cluster.num_nodes, "launch.generation_nodes=", text
    engines = sum(count_engine_gpus(config).values())
    training = sum(count_gpus(config).values()) - engines
    if config.generation.is_colocated or not cluster.gpus:
        return
    available = generation * cluster.gpus, (cluster.num_nodes - generation) * cluster.gpus
    text = (
        f"has {available[0]} GPUs for engines, which need {engines:g}, and leaves {available[1]} for the others, which"
    )
    text += f" need {training:g}"
    yield engines > available[0] or training > available[1], "launch.generation_nodes=", text


def find_slurm_settings(config: Config) -> Iterator[Problem]:
    """Find settings of the launch that Slurm alone has."""
    for name in ("seeds", "spares"):
        value = getattr(config.launch, name)
        if value:
            yield Problem(f"launch.{name}={value}", "is for slurm alone; leave it out")


def require_program(program: str, target: str) -> None:
    """Raise ConfigError without the program that submits."""
    if shutil.which(program) is None:
        text = f"is not on this machine, and submits to {target}; --dry-run prints what it would get"
        raise ConfigError([Problem(program, text)])
