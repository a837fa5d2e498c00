"""Programs in the sandbox hold no more memory than they may, whatever its kind, with a memory cgroup and without."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import LEVELS, IsolationLevel
from megatron_grpo.environments.sandbox.sandbox import MemoryCgroup, ProgramResult, Sandbox, find_cgroup_parent
from tests.support.forked import as_ordinary_user
from tests.support.held_memory import HOLDING, peak_of
from tests.support.rare import rare
from tests.support.sandboxed import CONFIG, STRONGEST, filtered, require_level

MIB = 2**20
LONG = replace(CONFIG, wall_time_s=60, cpu_time_s=60)
ALLOWED = (LONG.memory_mb + LONG.folder_mb + 64) * MIB
SECONDS = (
    "sockets",
    "sockets of many",
    "sockets in messages",
    "pipes",
    "page tables",
    "thread",
    "filled at once",
    "generations",
)
KINDS = [kind for kind in HOLDING if kind not in SECONDS] + rare(SECONDS)
HAS_GROUPS = find_cgroup_parent() is not None
ONCE = """
import os
held = bytearray(os.urandom(1)) * (120 << 20)
children = []
for _ in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        os._exit(sum(held[::4096]) < 0)
for child in children: assert os.waitpid(child, 0)[1] == 0
print('right')
"""
CHANGED = """
import os, time
held = bytearray(os.urandom(1)) * (100 << 20)
for part in range(4):
    if os.fork() == 0:
        for _ in range(3):
            for place in range(part * (10 << 20), (part + 1) * (10 << 20), 4096): held[place] ^= 1
        os._exit(held[part * (10 << 20)] == held[-1])
assert [os.wait()[1] for _ in range(4)] == [0] * 4
print('right')
"""
STARTED = """
import os, subprocess
held = bytearray(os.urandom(1)) * (140 << 20)
for _ in range(40): subprocess.run(['/bin/true'], check=True)  # shares its memory with the new process until that runs
print('right')
"""
NAMES = """
import ctypes, os, socket
one, other = socket.socketpair()
value, wide = ctypes.c_int(1 << 20), (1 << 32) | 7  # the kernel reads the lower half of the option's name
libc = ctypes.CDLL(None)
before = one.getsockopt(1, 7)
libc.syscall(*map(ctypes.c_long, (libc_number, one.fileno(), 1, wide)), ctypes.byref(value), ctypes.c_long(4))
print(one.getsockopt(1, 7) == before)
"""
SETSOCKOPT = {"x86_64": 54, "aarch64": 208}


@pytest.fixture(params=[True, False], ids=["cgroup", "no cgroup"])
def grouped(request: pytest.FixtureRequest) -> bool:
    """Whether programs have a memory cgroup."""
    if request.param and not HAS_GROUPS:
        pytest.skip("this machine allows no memory cgroups")
    return bool(request.param)


@pytest.fixture(autouse=True)
def no_file_is_left(nothing_is_left: None) -> Iterator[None]:
    before = shared_files()
    yield
    assert shared_files() <= before


def shared_files() -> set[str]:
    """Files in shared folders that a program of these tests could leave, and memory cgroups."""
    parent = find_cgroup_parent()
    groups = [] if parent is None else parent.glob(f"sandbox_{os.getpid()}_*")
    return {str(path) for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob("held-*")} | set(
        map(str, groups)
    )


def sandbox(grouped: bool, level: IsolationLevel | None = None) -> Sandbox:
    sandbox = Sandbox(LONG, level or STRONGEST)
    if not grouped:
        sandbox._cgroup_parent = None
    return sandbox


def holds_too_little(kind: str, grouped: bool, level: IsolationLevel) -> None:
    """Run a program that holds memory of this kind, and check how it ended and what it held."""
    base = peak_of(lambda: sandbox(grouped, level).run_python("pass"))[1]
    finished, peak = peak_of(lambda: sandbox(grouped, level).run_python(HOLDING[kind]))
    assert finished.ending == "memory" or (finished.ending == "exited" and finished.exit_code != 0), finished
    if peak is not None and base is not None:
        assert peak - base <= ALLOWED, f"{(peak - base) / MIB:.0f} MiB; {finished}"


@pytest.mark.turns(2)
@filtered
@pytest.mark.parametrize("kind", KINDS)
def test_no_program_holds_more_than_it_may(kind: str, grouped: bool) -> None:
    holds_too_little(kind, grouped, "filtered")


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize("kind", HOLDING)
def test_nor_at_the_weaker_levels(kind: str, grouped: bool, level: IsolationLevel) -> None:
    require_level(level)
    if (level, grouped, kind) == ("limits", False, "zero, unmapped"):
        pytest.skip("what this level does not hold without a cgroup, as the documentation says")
    holds_too_little(kind, grouped, level)


@pytest.mark.parametrize("source", [ONCE, CHANGED, STARTED], ids=["read", "changed in part", "of a new program"])
def test_pages_that_processes_share_count_once(source: str, grouped: bool) -> None:
    assert sandbox(grouped).run_python(source).stdout == "right\n"


@filtered
@pytest.mark.skipif(os.uname().machine not in SETSOCKOPT, reason="the number of setsockopt is another one here")
def test_the_filter_compares_what_the_kernel_reads() -> None:
    source = NAMES.replace("libc_number", str(SETSOCKOPT[os.uname().machine]))
    assert sandbox(grouped=True).run_python(source).stdout == "True\n"


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_has_no_capabilities(level: IsolationLevel) -> None:
    require_level(level)
    source = "print({line.split()[1] for line in open('/proc/self/status') if line[:6] in ('CapPrm', 'CapEff')})"
    assert sandbox(True, level).run_python(source).stdout == "{'0000000000000000'}\n"


def test_a_cgroup_ends_what_has_escaped_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GROUPS:
        pytest.skip("this machine allows no memory cgroups")
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox.ENDING_S", 0.2)
    source = """
import os, signal, time
launcher = os.getppid()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.setsid()
    os.kill(launcher, signal.SIGKILL)
    time.sleep(600)
time.sleep(600)
"""
    small_sandbox = Sandbox(replace(CONFIG, wall_time_s=2), "limits")
    finished = small_sandbox.run_python(source)
    path = Path("/proc", finished.stdout.strip(), "cmdline")
    assert not path.exists() or path.read_bytes() == b"", "it is gone, or nobody has taken its exit code yet"


def test_an_empty_cgroup_of_a_process_that_was_killed_is_removed() -> None:
    parent = find_cgroup_parent()
    if parent is None:
        pytest.skip("this machine allows no memory cgroups")
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    abandoned = parent / f"sandbox_{ended}_x"
    abandoned.mkdir()
    cgroup = MemoryCgroup(parent, MIB)
    assert find_cgroup_parent() == parent
    assert not abandoned.exists()
    cgroup.close()


@pytest.mark.parametrize("level", ["limits", STRONGEST])
@pytest.mark.parametrize("kind", ["private", "children"])
def test_an_ordinary_user_has_the_same_limit(kind: str, level: IsolationLevel) -> None:
    """On most machines such a user may make no cgroup, so that memory is read from /proc."""
    python = "/usr/bin/python3"
    if not (Path(python).exists() and os.access(Path(__file__).parents[4], os.X_OK | os.R_OK)):
        pytest.skip("no Python and checkout that every user may read")

    def outcome() -> ProgramResult:
        return Sandbox(LONG, level, python).run_python(HOLDING[kind])

    base = peak_of(lambda: as_ordinary_user(lambda: Sandbox(LONG, level, python).run_python("pass")))[1]
    finished, peak = peak_of(lambda: as_ordinary_user(outcome))
    assert peak is None or base is None or peak - base <= ALLOWED
    assert finished.ending == "memory" or "MemoryError" in finished.stderr, finished
