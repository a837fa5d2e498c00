"""Runs programs in the sandbox, and kills all processes of a program when it ends or exceeds a limit."""

from __future__ import annotations

import fcntl
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import megatron_grpo
from megatron_grpo.config.data_schema import LEVELS, Level, SandboxConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.environments.sandbox.kernel import LIBRARY, has_filter, list_descendants
from megatron_grpo.environments.sandbox.memory_limit import MemoryCgroup, find_cgroup_parent
from megatron_grpo.environments.sandbox.root import FOLDER

WATCH_S = 0.02
"""Seconds between two checks of a program's limits."""

ENDING_S = 10.0
"""Seconds that the launcher has to kill a program; after that the launcher itself is killed, and the program too."""

_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from megatron_grpo.environments.sandbox.launcher import main; main(*map(int, sys.argv[1:]))"
)
"""Code that starts the launcher in bare Python; arguments: the folder with this package, and file descriptors."""

_ROLE = "megatron_grpo.environments.sandbox.{}_process"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_MARSHAL = 4
"""Version of the marshal format that all Python versions in use can read."""
_MIB, _KIB = 2**20, 2**10
_PACKAGES = str(Path(megatron_grpo.__file__).parents[1])

Ending = Literal["exited", "wall time", "cpu time", "memory", "processes", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of a program."""

    ending: Ending
    """"exited": the program ended by itself, also with an error; else the limit that it exceeded."""
    exit_code: int
    """Exit code as in a shell: 128 plus the signal's number if a signal ended it."""
    stdout: str
    stderr: str
    """Standard error, like `stdout` up to the limit of output."""
    seconds: float
    """Seconds from the start until all processes of the program have ended."""

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself and without an error."""
        return self.ending == "exited" and self.exit_code == 0


class SandboxUnavailableError(RunError):
    """This machine does not allow the required level of isolation."""


class Sandbox:
    """Runs programs at one level of isolation. Thread-safe: each thread may run a program at the same time."""

    def __init__(self, config: SandboxConfig, level: Level | None = None, python: str | None = None) -> None:
        """
        Args:
            config: limits, and the folders that programs may read.
            level: level of isolation; None: the required one.
            python: interpreter of Python programs; None: the current one, without its virtual environment's packages.
        """
        self.level: Level = level or config.required
        self.python = python or os.path.realpath(sys.executable)
        self._config = config
        self._groups = find_cgroup_parent()
        prefix = [] if python else [sys.base_prefix]
        self._readable = [*prefix, *(os.path.abspath(folder) for folder in config.readable)]

    def run_python(self, source: str, stdin: str = "") -> ProgramResult:
        """Run a Python program in its own folder, without packages of a user."""
        # -I: ignore PYTHON* variables and user packages; -B: write no bytecode, which would fill the folder.
        return self.run([self.python, "-I", "-B", "main.py"], {"main.py": source}, stdin)

    def run(self, argv: Sequence[str], files: Mapping[str, str] | None = None, stdin: str = "") -> ProgramResult:
        """Run a program and wait for its end.

        Args:
            argv: program and arguments.
            files: texts of files in the program's folder, by relative name.
            stdin: text of the standard input.

        Raises:
            SandboxUnavailableError: the program was not started, because the machine does not allow this level.
        """
        with self._folder(files or {}) as (folder, inside):
            return self._run([self._spec(folder, argv=list(argv), files=inside)], stdin)

    def run_tests(self, program: str, tests: Mapping[str, Any], *, every: bool, allow: bool) -> ProgramResult:
        """Run Python tests against a program, each in a sandbox of its own; the program never has the tests.

        Args:
            program: source of the program.
            tests: `data.code_tests.PreparedTests` as a dict.
            every: whether to continue after a test that fails.
            allow: whether tests count even if their verdict cannot be trusted.

        Returns:
            The result of the process of the tests, with its report as `stdout` (`test_process.py`).
        """
        with self._folder({}) as (folder, _), self._folder({}) as (other, _):
            judged = self._spec(folder, role=_ROLE.format("test"), tests=dict(tests), every=every, allow=allow)
            return self._run([judged, self._spec(other, role=_ROLE.format("program"), source=program)], "")

    @contextmanager
    def _folder(self, files: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        """A program's folder, and the files that are still to be written inside the sandbox."""
        if self.level != "limits":
            yield FOLDER, dict(files)
            return
        with tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True) as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            yield folder, {}

    def _spec(self, folder: str, **what: Any) -> dict[str, Any]:
        """Description of a process for the launcher: its limits, and `what` it runs."""
        config = self._config
        return {
            "level": self.level,
            "filter": self.level == "filtered" or has_filter(),
            "folder": folder,
            "environment": {"PATH": _PATH, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            "readable": self._readable,
            "memory_bytes": config.memory_mb * _MIB,
            "folder_bytes": config.folder_mb * _MIB,
            "cpu_time_s": config.cpu_time_s,
            "processes": config.processes,
            "argv": [],
            "files": {},
            "role": None,
            **what,
        }

    def _run(self, specs: Sequence[dict[str, Any]], stdin: str) -> ProgramResult:
        """Run the process of the first description, and that of a second one, if any, as its partner."""
        started = time.monotonic()
        with self._group() as group:
            joining = None if group is None else group.joining
            spec_fds = [_sealed(marshal.dumps({**spec, "joining": joining}, _MARSHAL)) for spec in specs]
            stdin_fd = _sealed(stdin.encode(errors="replace"))
            status_read, status_write = os.pipe()
            descriptors = [spec_fds[0], status_write, *spec_fds[1:]]
            try:
                launcher = subprocess.Popen(
                    [self.python, "-I", "-S", "-c", _START, _PACKAGES, *map(str, descriptors)],
                    stdin=stdin_fd,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=descriptors if joining is None else [*descriptors, joining],
                    env={},
                    start_new_session=True,
                )
            finally:
                for fd in (*descriptors, stdin_fd):
                    os.close(fd)
            with launcher, open(status_read, "rb") as status:
                helpers = len(specs) + 2 * (len(specs) - 1)
                return _ProgramWatch(launcher, self._config, started, helpers, group).until_end(status)

    @contextmanager
    def _group(self) -> Iterator[MemoryCgroup | None]:
        """A memory group for one program, whose limit includes the program's folder; None: groups are not possible."""
        if self._groups is None:
            yield None
            return
        group = MemoryCgroup(self._groups, (self._config.memory_mb + self._config.folder_mb) * _MIB)
        try:
            yield group
        finally:
            group.close()


class _ProgramWatch:
    """Watches one running program."""

    def __init__(
        self,
        launcher: subprocess.Popen[bytes],
        config: SandboxConfig,
        started: float,
        helpers: int,
        group: MemoryCgroup | None,
    ) -> None:
        """
        Args:
            launcher: process that runs the program.
            config: limits.
            started: time.monotonic() when the start began.
            helpers: most processes below the launcher that do not belong to the program.
            group: memory cgroup of the program; without one the launcher watches its memory.
        """
        self._launcher, self._config, self._started = launcher, config, started
        self._helpers, self._group = helpers, group
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._status = bytearray()

    def until_end(self, status: Any) -> ProgramResult:
        """Wait for the end of the program; kill it if it exceeds a limit. `status`: the launcher's status pipe."""
        passed: Ending | None = None
        with selectors.DefaultSelector() as selector:
            pipes: dict[str, Any] = {"stdout": self._launcher.stdout, "stderr": self._launcher.stderr, "status": status}
            for name, pipe in pipes.items():
                selector.register(pipe, selectors.EVENT_READ, name)
            ends = self._started + self._config.wall_time_s
            look = 0.0
            while selector.get_map():
                now = time.monotonic()
                if now >= look:
                    look = now + WATCH_S
                    reason = self._passed(now, ends)
                    if reason is not None and passed is None:
                        passed, ends = reason, now + ENDING_S
                        self._launcher.send_signal(signal.SIGTERM)
                    elif reason == "wall time":
                        self._launcher.kill()
                        break  # remaining processes may keep the pipes open forever
                self._read(selector, WATCH_S)
        self._launcher.wait()
        return self._finished(passed)

    def _passed(self, now: float, ends: float) -> Ending | None:
        """The limit that the program exceeds, or None."""
        if now >= ends:
            return "wall time"
        if sum(map(len, self._output.values())) > self._config.output_kb * _KIB:
            return "output"
        living = list_descendants(self._launcher.pid)
        if len(living) > self._config.processes + self._helpers + 1:  # one process may be ending
            return "processes"
        return "memory" if self._group is not None and self._group.exceeded() else None

    def _read(self, selector: selectors.BaseSelector, timeout_s: float) -> None:
        """Read available output, and drop everything beyond the limit."""
        room = self._config.output_kb * _KIB + 1
        for key, _ in selector.select(timeout_s):
            data = os.read(key.fd, 65536)
            if not data:
                selector.unregister(key.fileobj)
            elif key.data == "status":
                self._status += data
            else:
                taken = self._output[key.data]
                taken += data[: max(room - len(taken), 0)]

    def _finished(self, passed: Ending | None) -> ProgramResult:
        what, _, rest = self._status.decode().partition("\n")[0].partition(" ")
        if what == "refused":
            said = self._output["stderr"].decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxUnavailableError(f"the program was not run: {': '.join(filter(None, (rest, said)))}")
        code = int(rest) if what else 128 + signal.SIGKILL
        if passed is None and (what == "memory" or (self._group is not None and self._group.exceeded())):
            passed = "memory"  # reported by the launcher, or exceeded since the last check
        ending: Ending = "cpu time" if passed is None and code == 128 + signal.SIGXCPU else passed or "exited"
        stdout, stderr = (self._output[name].decode(errors="replace") for name in ("stdout", "stderr"))
        seconds = time.monotonic() - self._started
        return ProgramResult(ending=ending, exit_code=code, stdout=stdout, stderr=stderr, seconds=seconds)


def _sealed(data: bytes) -> int:
    """File descriptor of a sealed (immutable) file in memory with the data, positioned at the beginning."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def open_sandbox(config: SandboxConfig, python: str | None = None) -> Sandbox:
    """Open a sandbox at the strongest level at which a trial program runs.

    Args:
        config: limits, and the least level that is accepted.
        python: interpreter of Python programs; None: the current one.

    Raises:
        SandboxUnavailableError: `sandbox.required` is not possible here; the message says why, and what would help.
    """
    reason = ""
    for level in reversed(LEVELS[LEVELS.index(config.required) :]):
        sandbox = Sandbox(config, level, python)
        why_not = _why_not(sandbox)
        if why_not is None:
            return sandbox
        reason = why_not
    raise SandboxUnavailableError(
        f"sandbox.required={config.required} is not possible on this machine: {reason}; "
        f"{_advice(config.required, reason)}, or accept less "
        f"with sandbox.required={LEVELS[max(LEVELS.index(config.required) - 1, 0)]} or run where it is possible"
    )


def _advice(required: Level, reason: str) -> str:
    """Advice for a user whose machine cannot run programs at the required level for this reason."""
    if required == "limits":
        return "it needs Linux with /proc"
    if LIBRARY in reason:
        return "install libseccomp (Debian, Ubuntu: libseccomp2)"
    return (
        "allow user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns of sysctl; in a "
        "container --security-opt seccomp=unconfined or --cap-add SYS_ADMIN)"
    )


def _why_not(sandbox: Sandbox) -> str | None:
    """Reason why a trial program does not run in the sandbox; None: it runs."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return "the kernel does not list the children of processes, so their memory cannot be watched"
    try:
        finished = sandbox.run_python("print('ready')")
    except SandboxUnavailableError as error:
        return str(error)
    if finished.stdout == "ready\n":
        return None
    said = finished.stderr.strip()[-200:]
    return f"a trial program ended by {finished.ending}, exit code {finished.exit_code}: {said}"
