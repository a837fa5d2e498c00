"""Runs programs in the sandbox, within limits."""

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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import megatron_grpo
from megatron_grpo.config.data_schema import LEVELS, IsolationLevel, SandboxConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.environments.sandbox.kernel import LIBRARY, has_filter, kill, list_descendants
from megatron_grpo.environments.sandbox.root import FOLDER

CHECK_PERIOD_S = 0.02  # between two checks of a program's limits

ENDING_S = 10.0  # seconds for the launcher to kill a program; then the launcher is killed, and the program with it

# Code that starts the launcher in bare Python; arguments: the folder with this package, and file descriptors.
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from megatron_grpo.environments.sandbox.launcher import main; main(*map(int, sys.argv[1:]))"
)

# Python refuses to convert integers of more than 4,300 digits, which programs that are right may print or read.
_ALL_DIGITS = ("-X", "int_max_str_digits=0")
_ROLE = "megatron_grpo.environments.sandbox.{}_process"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_MARSHAL = 4  # version of the marshal format that all Python versions in use can read
_CGROUP_PREFIX = "sandbox_"
_CGROUP_TIMEOUT_S = 10.0  # deadline for the killed processes of a cgroup to end
_MIB, _KIB = 2**20, 2**10
_PACKAGES = str(Path(megatron_grpo.__file__).parents[1])

Ending = Literal["exited", "wall time", "cpu time", "memory", "processes", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of a program."""

    ending: Ending  # "exited": the program ended by itself, also with an error; else the limit that it exceeded
    exit_code: int  # as in a shell: 128 plus the signal's number if a signal ended it
    stdout: str  # both outputs up to the limit of output
    stderr: str
    seconds: float  # from the start to the end of all processes of the program

    @property
    def succeeded(self) -> bool:
        return self.ending == "exited" and self.exit_code == 0


class SandboxUnavailableError(RunError):
    """This machine does not allow the required level of isolation."""


class Sandbox:
    """Runs programs at one level of isolation; safe for several threads."""

    def __init__(self, config: SandboxConfig, level: IsolationLevel | None = None, python: str | None = None) -> None:
        self.level: IsolationLevel = level or config.required
        # Without `python` it is the current interpreter, without its virtual environment's packages.
        self.python = python or os.path.realpath(sys.executable)
        self._config = config
        self._cgroup_parent = find_cgroup_parent()
        self._readable = [*([] if python else [sys.base_prefix]), *map(os.path.abspath, config.readable)]

    def run_python(self, source: str, stdin: str = "") -> ProgramResult:
        """Run a Python program, without the packages of a user."""
        # -I: ignore PYTHON* variables and user packages; -B: write no bytecode, which would fill the folder.
        return self.run([self.python, *_ALL_DIGITS, "-I", "-B", "main.py"], {"main.py": source}, stdin)

    def run(self, argv: Sequence[str], files: Mapping[str, str] | None = None, stdin: str = "") -> ProgramResult:
        """Run a program and wait for its end.

        `files` are texts in the program's folder, by relative name. SandboxUnavailableError: the program was not
        started, because the machine does not allow this level.
        """
        with self._make_folder(files or {}) as (folder, remaining_files):
            return self._run([self._describe(folder, argv=list(argv), files=remaining_files)], stdin)

    def run_tests(self, program: str, tests: dict[str, Any], *, run_all: bool, allow_untrusted: bool) -> ProgramResult:
        """Run Python tests and a program, in two sandboxes.

        The process of the program never has the tests. `tests` is a `data.code_tests.PreparedTests` as a dict. Returns
        the result of the process of the tests, with its report as `stdout` (`test_process.py`).
        """
        with self._make_folder({}) as (test_folder, _), self._make_folder({}) as (program_folder, _):
            contents = {"tests": tests, "run_all": run_all, "allow_untrusted": allow_untrusted}
            test_spec = self._describe(test_folder, role=_ROLE.format("test"), **contents)
            program_spec = self._describe(program_folder, role=_ROLE.format("program"), source=program)
            return self._run([test_spec, program_spec], "")

    @contextmanager
    def _make_folder(self, files: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Make a program's folder; yields it, and remaining files."""
        if self.level != "limits":  # the folder is made in the program's own file system
            yield FOLDER, dict(files)
            return
        with tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True) as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            yield folder, {}

    def _describe(self, folder: str, **contents: Any) -> dict[str, Any]:
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
            **contents,
        }

    def _run(self, specs: Sequence[dict[str, Any]], stdin: str) -> ProgramResult:
        """Run a process, with a second one as its partner."""
        start = time.monotonic()
        with ExitStack() as stack:
            cgroup = None
            if self._cgroup_parent is not None:
                # The files of the program's folder are in memory and count.
                limit = (self._config.memory_mb + self._config.folder_mb) * _MIB
                cgroup = stack.enter_context(closing(MemoryCgroup(self._cgroup_parent, limit)))
            join_fd = None if cgroup is None else cgroup.join_fd
            spec_fds = [_write_sealed(marshal.dumps({**spec, "join_fd": join_fd}, _MARSHAL)) for spec in specs]
            stdin_fd = _write_sealed(stdin.encode(errors="replace"))
            status_read, status_write = os.pipe()
            descriptors = [spec_fds[0], status_write, *spec_fds[1:]]
            try:
                launcher = subprocess.Popen(
                    [self.python, *_ALL_DIGITS, "-I", "-S", "-c", _START, _PACKAGES, *map(str, descriptors)],
                    stdin=stdin_fd,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=descriptors if join_fd is None else [*descriptors, join_fd],
                    env={},
                    start_new_session=True,
                )
            finally:
                for fd in (*descriptors, stdin_fd):
                    os.close(fd)
            with launcher, open(status_read, "rb") as status:
                helpers = len(specs) + 2 * (len(specs) - 1)
                return _ProgramWatch(launcher, self._config, start, helpers, cgroup).wait(status)


class MemoryCgroup:
    """Memory cgroup, in which the kernel kills processes above the limit."""

    # Where this process may make none, `memory_watch.py` watches the memory instead.

    def __init__(self, parent: Path, limit: int) -> None:
        """Make a cgroup of `limit` bytes below `parent`; OSError if not allowed."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_CGROUP_PREFIX}{os.getpid()}_", dir=parent))
        version_2 = Path(self._folder, "memory.max").exists()
        names = ("max", "swap.max") if version_2 else ("limit_in_bytes", "memsw.limit_in_bytes")
        limit_file, swap_file = (Path(self._folder, f"memory.{name}") for name in names)
        self._events = Path(self._folder, "memory.events" if version_2 else "memory.oom_control")
        try:
            limit_file.write_text(str(limit))
            if swap_file.exists():  # kernels without accounting of swap lack it
                swap_file.write_text("0" if version_2 else str(limit))
            # A process that writes 0 to this file descriptor joins the cgroup.
            self.join_fd = os.open(self._folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._folder.rmdir()
            raise

    def has_exceeded_limit(self) -> bool:
        lines = self._events.read_text().splitlines()
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)

    def close(self) -> None:
        # Processes that left the program's tree are still in its cgroup.
        os.close(self.join_fd)
        deadline = time.monotonic() + _CGROUP_TIMEOUT_S
        while True:
            kill(map(int, Path(self._folder, "cgroup.procs").read_text().split()), signal.SIGKILL)
            try:
                return self._folder.rmdir()
            except OSError:  # killed processes may still be ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)


def find_cgroup_parent() -> Path | None:
    """Find a cgroup in which this process may make others."""
    for folder in _list_candidates():
        try:
            MemoryCgroup(folder, 2**30).close()
        except OSError:
            continue
        for cgroup in folder.glob(f"{_CGROUP_PREFIX}*"):  # remove empty ones that killed processes left behind
            if not Path("/proc", cgroup.name.split("_")[1]).exists():
                with suppress(OSError):  # not empty
                    cgroup.rmdir()
        return folder
    return None


def _list_candidates() -> Iterator[Path]:
    """Yield this process's memory cgroup and, in version 2, its parent."""
    # A cgroup of version 2 that holds processes gives no memory controller to cgroups below it, but its parent does.
    cgroups: dict[str, str] = {}  # by controller, "" in version 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        cgroups |= dict.fromkeys(controllers.split(","), path)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in cgroups:
            yield Path(os.path.normpath(f"{mount_point}/{os.path.relpath(cgroups['memory'], root)}"))
        elif kind == "cgroup2" and "" in cgroups:
            folder = Path(os.path.normpath(f"{mount_point}/{os.path.relpath(cgroups[''], root)}"))
            yield from (folder, folder.parent) if folder != Path(mount_point) else (folder,)


@dataclass(eq=False)
class _ProgramWatch:
    """Watches one running program."""

    launcher: subprocess.Popen[bytes]
    config: SandboxConfig
    start: float  # time.monotonic() when the start began
    helpers: int  # most processes below the launcher that do not belong to the program
    cgroup: MemoryCgroup | None  # None: the launcher watches the memory
    _output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    _status: bytearray = field(default_factory=bytearray)

    def wait(self, status: IO[bytes]) -> ProgramResult:
        exceeded: Ending | None = None
        with selectors.DefaultSelector() as selector:
            pipes: dict[str, Any] = {"stdout": self.launcher.stdout, "stderr": self.launcher.stderr, "status": status}
            for name, pipe in pipes.items():
                selector.register(pipe, selectors.EVENT_READ, name)
            deadline = self.start + self.config.wall_time_s
            next_check = 0.0
            while selector.get_map():
                now = time.monotonic()
                if now >= next_check:
                    next_check = now + CHECK_PERIOD_S
                    limit = self._find_exceeded_limit(now, deadline)
                    if limit is not None and exceeded is None:
                        # The launcher kills all processes of the program; it has ENDING_S for that.
                        exceeded, deadline = limit, now + ENDING_S
                        self.launcher.send_signal(signal.SIGTERM)
                    elif limit == "wall time":
                        self.launcher.kill()
                        break  # remaining processes may keep the pipes open forever
                self._read(selector)
        self.launcher.wait()
        return self._make_result(exceeded)

    def _find_exceeded_limit(self, now: float, deadline: float) -> Ending | None:
        if now >= deadline:
            return "wall time"
        if sum(map(len, self._output.values())) > self.config.output_kb * _KIB:
            return "output"
        living = list_descendants(self.launcher.pid)
        if len(living) > self.config.processes + self.helpers + 1:  # one process may be ending
            return "processes"
        return "memory" if self.cgroup is not None and self.cgroup.has_exceeded_limit() else None

    def _read(self, selector: selectors.BaseSelector) -> None:
        room = self.config.output_kb * _KIB + 1  # one byte more than the limit, so that an excess is noticed
        for key, _ in selector.select(CHECK_PERIOD_S):
            data = os.read(key.fd, 65536)
            if not data:
                selector.unregister(key.fileobj)
            elif key.data == "status":
                self._status += data
            else:
                output = self._output[key.data]
                output += data[: max(room - len(output), 0)]

    def _make_result(self, exceeded: Ending | None) -> ProgramResult:
        status, _, details = self._status.decode().partition("\n")[0].partition(" ")
        if status == "refused":
            last_line = self._output["stderr"].decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxUnavailableError(f"the program was not run: {': '.join(filter(None, (details, last_line)))}")
        code = int(details) if status else 128 + signal.SIGKILL
        if exceeded is None and (status == "memory" or (self.cgroup is not None and self.cgroup.has_exceeded_limit())):
            exceeded = "memory"  # reported by the launcher, or exceeded since the last check
        ending: Ending = "cpu time" if exceeded is None and code == 128 + signal.SIGXCPU else exceeded or "exited"
        stdout, stderr = (self._output[name].decode(errors="replace") for name in ("stdout", "stderr"))
        seconds = time.monotonic() - self.start
        return ProgramResult(ending=ending, exit_code=code, stdout=stdout, stderr=stderr, seconds=seconds)


def _write_sealed(data: bytes) -> int:
    """Write data to an immutable file in memory; returns its descriptor."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def open_sandbox(config: SandboxConfig, python: str | None = None) -> Sandbox:
    """Open a sandbox at the strongest level that works here.

    SandboxUnavailableError: `sandbox.required` is not possible; the message says why, and what would help.
    """
    reason = ""
    for level in reversed(LEVELS[LEVELS.index(config.required) :]):
        sandbox = Sandbox(config, level, python)
        problem = _find_problem(sandbox)
        if problem is None:
            return sandbox
        reason = problem
    if config.required == "limits":
        advice = "it needs Linux with /proc"
    elif LIBRARY in reason:
        advice = "install libseccomp (Debian, Ubuntu: libseccomp2)"
    else:
        advice = (
            "allow user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns of sysctl; "
            "in a container --security-opt seccomp=unconfined or --cap-add SYS_ADMIN)"
        )
    weaker = LEVELS[max(LEVELS.index(config.required) - 1, 0)]
    raise SandboxUnavailableError(
        f"sandbox.required={config.required} is not possible on this machine: {reason}; {advice}, "
        f"or accept less with sandbox.required={weaker} or run where it is possible"
    )


def _find_problem(sandbox: Sandbox) -> str | None:
    """Say why a trial program does not run; None: it runs."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return "the kernel does not list the children of processes, so their memory cannot be watched"
    try:
        result = sandbox.run_python("print('ready')")
    except SandboxUnavailableError as error:
        return str(error)
    if result.stdout == "ready\n":
        return None
    return f"a trial program ended by {result.ending}, exit code {result.exit_code}: {result.stderr.strip()[-200:]}"
