"""Programs in the sandbox: what they cannot reach, and what they can."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.environments.sandbox.sandbox import Sandbox, open_sandbox
from tests.support.forked import as_ordinary_user
from tests.support.sandboxed import CONFIG, STRONGEST, filtered, isolated, run

SYSTEM_PYTHON = "/usr/bin/python3"
MARK = "MEGATRON_GRPO_TEST_SECRET"


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
    files = run("import os\nfor f, _, names in os.walk('/'):\n for n in names: print(n)\n if f.count('/') > 3: break")
    assert "secret.txt" not in files.stdout
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
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        source = f"""
import os, signal
for pid in (os.getppid(), 1, {sleeper.pid}, {os.getpid()}):
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
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


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
    (tmp_path / "inside").mkdir()
    config = SandboxConfig(readable=[str(tmp_path / "inside"), str(tmp_path)])
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
        return sandbox.level, {name: (result.succeeded, result.stdout) for name, result in ran.items()}

    level, ran = as_ordinary_user(outcomes)
    if level == "limits":
        pytest.skip("this machine allows ordinary users no namespaces")
    assert ran.pop("who") == (True, "1000 ['main.py']\n")
    assert not any(succeeded for succeeded, _ in ran.values()), ran
