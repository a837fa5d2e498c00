"""What a launch needs of a place where runs go, and the record of a launch in the run's folder."""

from __future__ import annotations

import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from megatron_grpo.cluster.process_log import LOGS_FOLDER
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.outside_files import open_to_append
from megatron_grpo.config.schema import Config
from megatron_grpo.launch.launch_request import Request
from megatron_grpo.observability.run_files import format_json_line, read_lines
from megatron_grpo.preflight.machine_checks import Reach
from megatron_grpo.run.directory import LAUNCH_FOLDER, RECORD_FILE, STOP_FILE, is_alive

OUTPUT_FILE = "output.log"  # in the run's folder: the driver's output, where nothing else keeps it
_WORD = re.compile(r"[A-Za-z0-9/][^\x00-\x1f]*")  # no option of a program


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run, a line of launch/launches.jsonl.

    Example:
        Launch(Path("outputs/mine"), "slurm", job="123", folder="/home/me", seeds=[], settings={},
               submitted="2026-01-31 12:00:00")
    """

    run_dir: Path
    """Folder on this machine with the record."""
    target: str
    job: str
    """Name of the job at the target."""
    folder: str
    """Folder in which launch was called."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of an array of jobs."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of the target that finding the job again needs."""
    submitted: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    """Local time of the launch."""

    @property
    def runs(self) -> list[Path]:
        """Folders of its runs, one a seed."""
        return [self.run_dir / f"seed_{seed}" for seed in self.seeds] or [self.run_dir]


class Target(ABC):
    """A place where runs go: Slurm, Kubernetes, a Ray cluster, this machine."""

    name: ClassVar[str]
    file_name: ClassVar[str]
    """File in launch/ with what was submitted."""
    reach: ClassVar[Reach]
    """What of this machine a job meets."""

    def find_problems(self, config: Config) -> Iterator[Problem]:
        """Find settings of the launch that cannot be used here."""
        yield from ()

    @abstractmethod
    def render(self, request: Request) -> str:
        """Write what is submitted, as text."""

    @abstractmethod
    def submit(self, request: Request, file: Path) -> Launch:
        """Submit the rendered file; ConfigError or RunError: it is not accepted."""

    @abstractmethod
    def describe(self, launch: Launch) -> str:
        """Describe the state of a job in a line."""

    @abstractmethod
    def cancel(self, launch: Launch) -> None:
        """End a job at once, without a save."""

    def stop(self, launch: Launch) -> str:
        """Let runs save and end, and cancel what waits; say what was done."""
        alive = [folder for folder in launch.runs if is_alive(folder)]
        for folder in alive:
            (folder / STOP_FILE).touch()
        if len(alive) < len(launch.runs):
            self.cancel_waiting(launch)
        if alive:
            return f"{', '.join(map(str, alive))} will end after the step that it is in, with a checkpoint"
        return f"no run of {self.name} job {launch.job} is alive; what waits is cancelled"

    def cancel_waiting(self, launch: Launch) -> None:
        """Cancel jobs that have not begun."""
        self.cancel(launch)

    def find_output(self, launch: Launch) -> list[Path]:
        """Find the files on this machine with the output of the job."""
        return [launch.run_dir / OUTPUT_FILE]

    def print_log(self, launch: Launch, process: str | None, lines: int, follow: bool) -> int:
        """Print the end of the output or a log; return the exit code."""
        files = self.find_output(launch) if process is None else [find_log(launch.run_dir, process)]
        return print_files(files, lines, follow)


def record_launch(launch: Launch) -> None:
    """Append a launch to the record of its run."""
    row = asdict(launch)
    del row["run_dir"]  # the folder may be moved
    with open_to_append(launch.run_dir / LAUNCH_FOLDER / RECORD_FILE) as file:
        file.write(format_json_line(row))


def read_launch(run_dir: Path) -> Launch | None:
    """Read the last launch of a run, or of its array.

    None: it was not launched so. ValueError: the record is damaged.
    """
    if (launch := _read_record(run_dir)) is not None:
        return launch
    seed = re.fullmatch(r"seed_(\d+)", run_dir.absolute().name)
    array = _read_record(run_dir.absolute().parent) if seed else None
    if seed is None or array is None or int(seed[1]) not in array.seeds:
        return None
    return replace(array, run_dir=run_dir, job=f"{array.job}_{array.seeds.index(int(seed[1]))}", seeds=[])


def _read_record(run_dir: Path) -> Launch | None:
    path = run_dir / LAUNCH_FOLDER / RECORD_FILE
    rows = read_lines(path)
    try:
        launch = TypeAdapter(Launch).validate_python({**rows[-1], "run_dir": run_dir}) if rows else None
    except ValidationError:
        raise ValueError(f"{path} is damaged: its last line is no launch") from None
    texts = [] if launch is None else [launch.job, *launch.settings.values()]
    # A program gets these texts as arguments, and the folder may be from elsewhere.
    if not all(_WORD.fullmatch(text) for text in texts):
        raise ValueError(f"{path} is damaged: it names no job")
    return launch


def make_launch_folder(run_dir: Path) -> Path:
    """Make the folder of a launch; only the user may look into the run's."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = run_dir / LAUNCH_FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def find_log(run_dir: Path, process: str) -> Path:
    """Find the log of a process, such as policy.3; ValueError: there is none."""
    folder = run_dir / LOGS_FOLDER
    return folder / choose_log((path.name for path in folder.glob("*.log")), process)


def choose_log(names: Iterable[str], process: str) -> str:
    """Choose the log of a process by the words of its name.

    ValueError: there is not one alone.

    Example: policy.3 is policy_rank_3.log, engine.0 generation_engine_0.log, driver driver.log.
    """
    words = re.findall(r"[a-z]+|\d+", process.lower())
    candidates = sorted(name.removesuffix(".log") for name in names)
    matches = [name for name in candidates if {*words} <= {*re.findall(r"[a-z]+|\d+", name)}]
    # An engine's name begins those of its core and its workers.
    if len(matches) > 1 and all(name.startswith(f"{matches[0]}_") for name in matches[1:]):
        matches = matches[:1]
    if len(matches) != 1 or not words:
        names_here = ", ".join(matches or candidates) or "no log yet"
        raise ValueError(f"--process {process} is not the name of one process; there is {names_here}")
    return f"{matches[0]}.log"


def print_files(files: Sequence[Path], lines: int, follow: bool) -> int:
    """Print the ends of files, and additions; return the exit code."""
    missing = [str(file) for file in files if not file.exists()]
    if missing and not follow:
        raise ValueError(f"{', '.join(missing)}: no output yet")
    return subprocess.run([*make_tail_command(lines, follow), "--", *map(str, files)], check=False).returncode


def make_tail_command(lines: int, follow: bool) -> list[str]:
    """Make the command that prints the end of files; `follow`: and additions."""
    return ["tail", "-n", str(lines), *(["-F"] if follow else [])]
