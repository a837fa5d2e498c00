"""Where metrics come from that are compared: runs of a revision or of a checkout, or records of such runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from header import commit

ROOT = Path(__file__).parents[1]
FILES = ("metrics.jsonl", "validation.jsonl")
COMMAND_FILE, LOG_FILE = "command.txt", "log.txt"
NOT_ACCEPTED = 2
"""Exit code of the train command for a configuration with mistakes."""
ENDING_S = 30.0
LOG_TAIL_LINES = 15
ELSEWHERE = {"megatron_grpo/conf": "conf", "megatron_grpo_kernels": "kernels"}
"""Packages that lie in another folder of the repository (setup.py)."""


class NotKnownError(Exception):
    """A side has no case of the wanted name."""


class FailedError(Exception):
    """A side has the wanted case, but no metrics of it that could be compared."""


class Side(Protocol):
    """One of the two checkouts or recordings that are compared."""

    def metrics_of(self, name: str, overrides: Sequence[str]) -> Path:
        """The folder with the metrics of a case."""


@dataclass
class Recorded:
    """Metrics from an earlier run of this script."""

    folder: Path

    def metrics_of(self, name: str, overrides: Sequence[str]) -> Path:
        """The folder with the recorded metrics of a case, if they are of an equal command line."""
        case = self.folder / name
        if not (case / COMMAND_FILE).exists():
            raise NotKnownError("not recorded")
        recorded = [word for word in shlex.split((case / COMMAND_FILE).read_text()) if not word.startswith("run_dir=")]
        if recorded[recorded.index("megatron_grpo.train") + 1 :] != list(overrides):
            raise FailedError(f"recorded with other overrides: {shlex.join(recorded)}")
        return case


@dataclass
class Checkout:
    """Code to be run."""

    packages: Path
    """Folder that Python finds it in."""
    results: Path
    """Folder for a folder of each case."""
    work: Path
    """Folder for what nobody needs afterwards; the prepared model, too, is each side's own."""
    deadline_s: float

    def metrics_of(self, name: str, overrides: Sequence[str]) -> Path:
        """Train, and keep metrics, command line and output."""
        case, run_dir = self.results / name, self.work / "runs" / name
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        command = [sys.executable, "-m", "megatron_grpo.train", *overrides, f"run_dir={run_dir}"]
        code = self._run(command, case / LOG_FILE)
        if code != 0:
            ended = f"still running after {self.deadline_s:g} s" if code is None else f"exit code {code}"
            report = f"{ended}; the end of its output:\n{_tail(case / LOG_FILE)}"
            raise (NotKnownError if code == NOT_ACCEPTED else FailedError)(report)
        for file in (*FILES, "summary.json"):
            if (run_dir / file).exists():
                shutil.copy(run_dir / file, case)
        (case / COMMAND_FILE).write_text(shlex.join(command) + "\n")  # last: without it the case is not recorded
        return case

    def _run(self, command: Sequence[str], log: Path) -> int | None:
        """The exit code; None: it had to be ended."""
        environment = environment_of(self.packages) | {"MEGATRON_GRPO_CACHE": str(self.work / "cache")}
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command,
                cwd=self.packages,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                return process.wait(self.deadline_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, so that it can end its own processes, before it is made to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()


def environment_of(packages: Path) -> dict[str, str]:
    """Environment of a process that finds our packages in a folder, whatever is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def link_packages(checkout: Path, folder: Path) -> None:
    """Make a folder in which Python finds the packages of a checkout, and none of an installed one."""
    package = folder / "megatron_grpo"
    package.mkdir(parents=True)
    for name, target in ELSEWHERE.items():
        if (checkout / target).exists():
            (folder / name).symlink_to(checkout / target)
    for entry in (checkout / "megatron_grpo").iterdir():
        if entry.name != "__pycache__" and not (package / entry.name).exists():
            (package / entry.name).symlink_to(entry)
    _write_entry_points(checkout, folder)
    code = "import megatron_grpo, megatron_grpo.conf as conf; print(megatron_grpo.__file__, conf.__file__, sep='\\n')"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment_of(folder), capture_output=True, text=True, check=True
    )
    if not all(file.startswith(f"{folder}{os.sep}") for file in process.stdout.splitlines()):
        raise RuntimeError(f"Python finds other packages than those of {checkout}: {process.stdout}")


def _write_entry_points(checkout: Path, folder: Path) -> None:
    """Give the folder the entry points of the checkout: vLLM finds our plugin by the first distribution of the name."""
    if not (checkout / "pyproject.toml").exists():
        return
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    distribution = folder / f"{project['name']}-{project['version']}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (distribution / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def opened(source: str, results: Path, deadline_s: float) -> Iterator[tuple[Side, str | None]]:
    """A side and its commit (None: of records), from a folder with records, a checkout or a revision."""
    folder = Path(source).resolve()
    if any(folder.glob(f"*/{COMMAND_FILE}")):
        yield Recorded(folder), None
        return
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="same_numbers_", ignore_cleanup_errors=True)
        work = Path(stack.enter_context(temporary)).resolve()
        if not (folder / "megatron_grpo" / "train.py").exists():
            folder = stack.enter_context(_worktree(source, work / "checkout"))
        link_packages(folder, work / "packages")
        yield Checkout(work / "packages", results, work, deadline_s), commit(folder)


@contextmanager
def _worktree(revision: str, folder: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    added = subprocess.run([*git, "add", "--detach", str(folder), revision], capture_output=True, text=True)
    if added.returncode:
        raise SystemExit(f"{revision}: neither records nor a checkout nor a revision: {added.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False, stdout=subprocess.DEVNULL)
