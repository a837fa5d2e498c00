"""Programs in the sandbox: what they may do and use, what they cannot reach, and that nothing of them is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_grpo.config.sandbox_schema import LEVELS, Level, SandboxConfig
from megatron_grpo.environments.sandbox import entrance
from megatron_grpo.environments.sandbox.opening import open_sandbox
from megatron_grpo.environments.sandbox.process_tree import descendants
from megatron_grpo.environments.sandbox.sandbox import Sandbox, SandboxUnavailableError
from tests.support.ordinary_user import as_ordinary_user
from tests.support.sandboxed import CONFIG, STRONGEST, filtered, isolated, run

SYSTEM_PYTHON = "/usr/bin/python3"
MARK = "MEGATRON_GRPO_TEST_SECRET"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_reads_writes_and_ends(level: Level) -> None:
    if STRONGEST is None or LEVELS.index(level) > LEVELS.index(STRONGEST):
        pytest.skip("not possible on this machine")
    source = """
import os, sys
open('own.txt', 'w').write('kept')
print(open('own.txt').read(), sys.stdin.read(), sorted(os.listdir('.')))
print('to stderr', file=sys.stderr)
sys.exit(3)
"""
    finished = run(source, "given", level)
    assert finished.stdout == "kept given ['main.py', 'own.txt']\n"
    assert (finished.stderr, finished.exit_code, finished.ending) == ("to stderr\n", 3, "exited")
    assert not finished.succeeded
    assert run("pass", level=level).succeeded


@isolated
def test_any_program_runs_with_files_of_its_own() -> None:
    sandbox = Sandbox(CONFIG, STRONGEST)
    finished = sandbox.run(["/bin/sh", "-c", "cat folder/a.txt; id -u"], {"folder/a.txt": "text\n"})
    assert finished.stdout.splitlines()[0] == "text"
    assert finished.stdout.splitlines()[1] != "0"
    missing = sandbox.run(["no-such-program"])
    assert missing.exit_code == 127
    assert "cannot run no-such-program" in missing.stderr


@isolated
def test_threads_and_processes_work_up_to_the_limit() -> None:
    source = """
import multiprocessing, subprocess, threading
thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()
print(subprocess.run(['/bin/echo', 'process'], capture_output=True, text=True).stdout)
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
"""
    finished = run(source)
    assert finished.stdout.split() == ["thread", "process", "[1,", "2]"], finished
    assert finished.succeeded


def test_an_endless_loop_ends_with_its_time() -> None:
    finished = run("while True: pass", config=SandboxConfig(wall_time_s=1, cpu_time_s=60))
    assert finished.ending == "wall time"
    assert 0.9 < finished.seconds < 5
    assert not finished.succeeded


def test_a_process_ends_with_its_processor_time() -> None:
    finished = run("while True: pass", config=SandboxConfig(wall_time_s=60, cpu_time_s=1))
    assert finished.ending == "cpu time"
    assert finished.seconds < 30


def test_sleeping_through_a_request_to_end_does_not_help() -> None:
    source = "import signal, time\nfor s in (2, 15, 1): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)"
    assert run(source, config=SandboxConfig(wall_time_s=1)).ending == "wall time"


def test_a_memory_bomb_is_contained() -> None:
    finished = run("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert not finished.succeeded
    assert finished.ending == "memory" or "MemoryError" in finished.stderr


@isolated
@pytest.mark.parametrize(
    "source",
    [
        "import os, time\nfor _ in range(5): os.fork()\nx = bytearray(os.urandom(1)) * (60 << 20)\ntime.sleep(60)",
        "import mmap\nm = mmap.mmap(-1, 1 << 30)\nwhile True: m.write(b'x' * 4096)",
    ],
    ids=["in many processes", "shared"],
)
def test_memory_of_all_processes_together_is_limited(source: str) -> None:
    finished = run(source)
    assert finished.ending == "memory" or finished.exit_code != 0, finished
    assert not finished.succeeded


@isolated
def test_files_are_limited_in_size_all_together_and_in_number() -> None:
    source = "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))"
    assert "No space left" in run(source).stderr
    assert "No space left" in run("for n in range(20000): open(f'{n}', 'w').close()").stderr


@isolated
def test_a_fork_bomb_is_contained() -> None:
    for source in (
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    ):
        finished = run(source, config=SandboxConfig(wall_time_s=3, processes=8))
        assert not finished.succeeded
        assert finished.seconds < 20


def test_endless_output_is_cut() -> None:
    finished = run("while True: print('x' * 1000)")
    assert finished.ending == "output"
    assert len(finished.stdout) <= 16 * 1024 + 1
    assert run("import sys\nwhile True: sys.stderr.write('x' * 1000)").ending == "output"


@isolated
def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for source in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=3); print('reached')",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=3); print('reached')",
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('8.8.8.8', 53))"
            "; print('reached')",
        ):
            finished = run(source)
            assert "reached" not in finished.stdout
            assert not finished.succeeded
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@filtered
@pytest.mark.parametrize(
    "call",
    [
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
        "os.memfd_create('unlimited')",
        "check(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))",
        "check(ctypes.CDLL(None, use_errno=True).ptrace(16, os.getppid(), 0, 0))",
        "check(ctypes.CDLL(None, use_errno=True).shmget(0, 1 << 20, 0o1600))",
    ],
)
def test_the_filter_refuses_what_limits_and_namespaces_do_not_hold(call: str) -> None:
    check = "def check(result):\n if result < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
    finished = run(f"import ctypes, os, socket\n{check}{call}\nprint('reached')")
    assert "reached" not in finished.stdout
    assert "PermissionError" in finished.stderr


@isolated
def test_files_of_the_project_and_of_others_cannot_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(MARK)
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    for path in (secret, Path(__file__), "/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/1/root/etc/hosts"):
        finished = run(f"print(len(open({str(path)!r}, 'rb').read()), 'bytes')")
        assert "bytes" not in finished.stdout, path
        assert not finished.succeeded
    seen = run("import os\nfor f, _, names in os.walk('/'):\n for n in names: print(n)\n if f.count('/') > 3: break")
    assert "secret.txt" not in seen.stdout
    environment = run("import os; print(dict(os.environ))")
    assert "PYTEST" not in environment.stdout


@isolated
def test_nothing_outside_its_folder_can_be_written() -> None:
    source = """
import os
written = []
for folder in ('/', '/usr', '/usr/lib', '/etc', '/dev', '/proc', '/root', '/bin', '/home', '/var/tmp'):
    try:
        open(os.path.join(folder, 'mark'), 'w').write('x')
    except OSError:
        continue
    written.append(folder)
print(written)
"""
    assert run(source).stdout == "[]\n"
    assert not run("open('/usr/mark', 'w')").succeeded


@isolated
def test_a_symlink_out_leads_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(MARK)
    source = f"""
import os
os.symlink({str(tmp_path)!r}, 'out')
os.symlink('/proc/1/root', 'root')
for path in ('out/secret.txt', 'root{tmp_path}/secret.txt', '/proc/self/cwd/../{tmp_path}/secret.txt'):
    try:
        print(open(path).read())
    except OSError as error:
        print('refused')
open('out/written', 'w').write('x')
"""
    finished = run(source)
    assert finished.stdout == "refused\n" * 3
    assert not finished.succeeded
    assert [path.name for path in tmp_path.iterdir()] == ["secret.txt"]


@isolated
def test_its_parent_and_other_processes_cannot_be_killed() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        source = f"""
import os, signal
for pid in (os.getppid(), 1, {other.pid}, {os.getpid()}):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print('refused')
print('lives on' if os.getppid() == 1 else 'orphaned')
os.kill(-1, signal.SIGKILL)
os.abort()
"""
        finished = run(source)
        assert finished.stdout.endswith("lives on\n")
        assert not finished.succeeded
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("level", LEVELS)
def test_what_it_left_running_ends_with_it(level: Level) -> None:
    if STRONGEST is None or LEVELS.index(level) > LEVELS.index(STRONGEST):
        pytest.skip("not possible on this machine")
    source = """
import os, subprocess
for _ in range(3):
    subprocess.Popen(['/bin/sleep', '98765'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sleep', ['sleep', '98765'])
    os._exit(0)
"""
    finished = run(source, level=level)
    assert finished.ending == "exited"
    assert finished.seconds < CONFIG.wall_time_s
    assert "98765" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@isolated
def test_programs_end_with_the_process_that_runs_them() -> None:
    code = (
        "from megatron_grpo.environments.sandbox.sandbox import Sandbox\n"
        "from megatron_grpo.config.sandbox_schema import SandboxConfig\n"
        f"Sandbox(SandboxConfig(wall_time_s=100, cpu_time_s=100), {STRONGEST!r}).run(['/bin/sleep', '87654'])\n"
    )
    root = Path(__file__).parents[4]
    running = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)})

    def sleeps() -> bool:
        return "sleep 87654" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout

    wait_until(sleeps)
    running.kill()
    running.wait()
    wait_until(lambda: not sleeps())


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@isolated
def test_programs_side_by_side_do_not_see_each_other() -> None:
    sandbox = Sandbox(CONFIG, STRONGEST)
    source = """
import os, time
open('mine', 'w').write(input())
time.sleep(0.3)
print(sorted(os.listdir('.')), open('mine').read())
"""
    with ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(lambda number: sandbox.run_python(source, str(number)).stdout, range(6)))
    assert outputs == [f"['main.py', 'mine'] {number}\n" for number in range(6)]
    assert threading.active_count() < 20


def test_folders_that_are_named_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "package.py").write_text("VALUE = 17")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        os.chmod(folder, os.stat(folder).st_mode | 0o055)
    config = SandboxConfig(readable=[str(tmp_path)])
    source = f"import sys; sys.path.append({str(tmp_path)!r}); import package; print(package.VALUE)"
    finished = run(source, config=config)
    assert finished.stdout == "17\n", finished.stderr


@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="no Python that every user may run")
def test_an_ordinary_user_gets_the_same_isolation() -> None:
    if not os.access(Path(__file__).parents[4], os.X_OK | os.R_OK):
        pytest.skip("the checkout is readable for its owner only")
    sources = {
        "who": "import os; print(os.getuid(), os.listdir('.'))",
        "network": "import socket; socket.create_connection(('127.0.0.1', 80), timeout=2)",
        "write": "open('/usr/mark', 'w')",
        "read": f"open({__file__!r})",
        "fork bomb": "import os\nwhile True: os.fork()",
        "mount": "import ctypes, sys; sys.exit(ctypes.CDLL(None).mount(b'x', b'/program', b'tmpfs', 0, None) != 0)",
    }

    def outcomes() -> tuple[str, dict[str, tuple[bool, str]]]:
        sandbox = open_sandbox(SandboxConfig(required="limits", wall_time_s=5), SYSTEM_PYTHON)
        ran = {name: sandbox.run_python(source) for name, source in sources.items()}
        return sandbox.level, {name: (one.succeeded, one.stdout) for name, one in ran.items()}

    level, ran = as_ordinary_user(outcomes)
    if level == "limits":
        pytest.skip("this machine allows ordinary users no namespaces")
    assert ran.pop("who") == (True, "1000 ['main.py']\n")
    assert not any(succeeded for succeeded, _ in ran.values()), ran


@isolated
def test_what_keeps_a_program_from_starting_is_told() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"the program was not run: .*Read-only file system"):
        Sandbox(CONFIG, STRONGEST).run(["/bin/true"], {"../outside.txt": ""})


def test_less_than_what_is_required_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.environments.sandbox.opening._why_not", _only_limits)
    assert open_sandbox(SandboxConfig(required="limits")).level == "limits"
    for required in ("namespaces", "filtered"):
        with pytest.raises(SandboxUnavailableError) as refused:
            open_sandbox(SandboxConfig(required=required))
        assert f"sandbox.required={required} is not possible on this machine: unshare" in str(refused.value)
        assert "allow user namespaces" in str(refused.value)
        assert "or accept less with sandbox.required=" in str(refused.value)


def test_a_machine_without_the_filter_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "cannot run python3: libseccomp.so.2: cannot open shared object file: No such file or directory"
    monkeypatch.setattr("megatron_grpo.environments.sandbox.opening._why_not", lambda sandbox: said)
    with pytest.raises(SandboxUnavailableError, match="No such file or directory; install libseccomp"):
        open_sandbox(SandboxConfig())


def _only_limits(sandbox: Sandbox) -> str | None:
    return None if sandbox.level == "limits" else "unshare: Operation not permitted"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux's unshare makes the machine that refuses")
@isolated
def test_a_machine_without_namespaces_really_refuses() -> None:
    """In a user namespace that may have no further ones, as in a container that forbids them."""
    code = (
        "from megatron_grpo.environments.sandbox.opening import open_sandbox\n"
        "from megatron_grpo.config.sandbox_schema import SandboxConfig\n"
        "print(open_sandbox(SandboxConfig(required='limits')).level)\n"
        "open_sandbox(SandboxConfig())\n"
    )
    inner = f'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all {sys.executable} -c "$CODE"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inner]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "CODE": code}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "limits\n", done.stderr
    assert "SandboxUnavailableError: sandbox.required=filtered is not possible on this machine: " in done.stderr


def test_a_request_to_end_that_comes_after_the_end_is_no_error() -> None:
    """As when the time of a program passes just as it has ended by itself."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    before = signal.getsignal(signal.SIGTERM)
    try:
        entrance._end_on_request(ended.pid)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
