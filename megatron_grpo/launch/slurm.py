"""Jobs of Slurm: the launcher's script with the settings of a launch, and what Slurm says about a job."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.launch.launch_request import Request, require_program
from megatron_grpo.launch.target import Launch, Target

TEMPLATE = "slurm_pyxis.sbatch"
SIGNAL_MARGIN_S = 60  # between the seconds of a save and the signal before them
_OPTION = re.compile(r"^#SBATCH .*\n", re.MULTILINE)


class SlurmTarget(Target):
    """Jobs of Slurm, on a filesystem that this machine shares with the nodes."""

    name = "slurm"
    file_name = "job.sbatch"
    reach = "files"

    def find_problems(self, config: Config) -> Iterator[Problem]:
        """Find settings that a job of Slurm cannot have."""
        launch = config.launch
        if launch.seeds and launch.generation_nodes is not None:
            text = "needs a heterogeneous job, which cannot be an array; launch each seed"
            yield Problem(f"launch.generation_nodes={launch.generation_nodes}", text)

    def render(self, request: Request) -> str:
        """Write the script of a job: the launcher's, with the settings below its options."""
        template = read_template()
        *_, last = _OPTION.finditer(template)
        block = "\n".join([*_list_options(request.config), "", *_list_settings(request)])
        return f"{template[: last.end()]}{block}\n{template[last.end() :]}"

    def submit(self, request: Request, file: Path) -> Launch:
        """Submit a script; RunError: Slurm refuses it."""
        require_program("sbatch", self.name)
        job = _call("sbatch", "--parsable", f"--chdir={request.folder}", str(file)).partition(";")[0]
        return Launch(request.local_run_dir, self.name, job, str(request.folder), request.config.launch.seeds)

    def describe(self, launch: Launch) -> str:
        """Describe the states of a job and of the jobs of an array."""
        try:
            states = _call("squeue", f"--jobs={launch.job}", "--states=all", "--noheader", "--format=%i %T %R")
        except RunError as error:
            if "Invalid job id" not in str(error):
                raise
            states = ""
        lines = [line.split(maxsplit=2) for line in states.splitlines()]
        described = [f"job {job} is {state.lower()} {' '.join(reason)}".rstrip() for job, state, *reason in lines]
        return "\n".join(described) or f"job {launch.job} has ended, and Slurm has forgotten it"

    def cancel(self, launch: Launch) -> None:
        """Cancel a job, or all jobs of an array."""
        _call("scancel", launch.job)

    def cancel_waiting(self, launch: Launch) -> None:
        """Cancel the waiting jobs of an array, or the job."""
        _call("scancel", *(["--state=PENDING"] if launch.seeds else []), launch.job)

    def find_output(self, launch: Launch) -> list[Path]:
        """Find the output of each job, in the folder that it was submitted from."""
        jobs = [f"{launch.job}_{index}" for index in range(len(launch.seeds))] or [launch.job]
        return [Path(launch.folder, f"slurm-{job}.out") for job in jobs]


def read_template() -> str:
    """Read the launcher's script, which `sbatch` takes as it is, too."""
    return resources.files("megatron_grpo.launch").joinpath(TEMPLATE).read_text(encoding="utf-8")


def _list_options(config: Config) -> Iterator[str]:
    """List the lines of a job's options, those of engines last."""
    launch, slurm, cluster = config.launch, config.launch.slurm, config.cluster
    shared = [f"--gpus-per-node={cluster.gpus}"] if cluster.gpus else []
    shared += [f"--account={slurm.account}"] if slurm.account else []
    shared += [f"--qos={slurm.qos}"] if slurm.qos else []
    if launch.time_limit_s is not None:
        shared.append(f"--time={math.ceil(launch.time_limit_s / 60)}")
    nodes = cluster.num_nodes - (launch.generation_nodes or 0)
    options = [f"--nodes={nodes + launch.spares}", *shared]
    options += [f"--partition={slurm.partition}"] if slurm.partition else []
    options.append(f"--signal=B:USR1@{slurm.save_s + SIGNAL_MARGIN_S}")
    if launch.seeds:
        options += [f"--array=0-{len(launch.seeds) - 1}", "--output=slurm-%A_%a.out"]
    yield from (f"#SBATCH {option}" for option in [*options, *slurm.options])
    if launch.generation_nodes is not None:
        yield "#SBATCH hetjob"
        options = [
            f"--nodes={launch.generation_nodes + launch.spares}",
            "--ntasks-per-node=1",
            "--exclusive",
            "--mem=0",
        ]
        options += shared
        if slurm.partition and not any(option.startswith("--partition=") for option in slurm.generation_options):
            options.append(f"--partition={slurm.partition}")
        yield from (f"#SBATCH {option}" for option in [*options, *slurm.generation_options])


def _list_settings(request: Request) -> Iterator[str]:
    """List the lines of a job's variables and arguments, quoted for bash."""
    config, launch = request.config, request.config.launch
    settings = {
        "CONTAINER_IMAGE": launch.image or "",
        "CONTAINER_MOUNTS": ",".join(launch.slurm.mounts),
        "PYTHON": request.python,
        "RUN_DIR": request.run_dir,
        "GPUS_PER_NODE": str(config.cluster.gpus),
        "SPARES": str(launch.spares),
        "CHECK_TIME": str(launch.check_s),
        "SEEDS": " ".join(map(str, launch.seeds)),
        "SEED_KEY": f"{config.loop_name}.seed",
        "SAVE_TIME": str(launch.slurm.save_s),
    }
    yield from (f"{name}={shlex.quote(value)}" for name, value in settings.items())
    yield f"set -- {shlex.join(request.arguments)}".rstrip()


def _call(*command: str) -> str:
    """Call a program of Slurm; RunError: it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} does not answer within 60 s") from None
    if process.returncode:
        raise RunError(f"{command[0]} fails: {process.stderr.strip() or f'exit code {process.returncode}'}")
    return process.stdout.strip()
