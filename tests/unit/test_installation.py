"""The scripts that make an environment: which Python they take, what uv and pip are asked for, and in which order.

Programs are stand-ins that write down how they were called, on a PATH that has nothing else.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
TOOLS = ("bash", "dirname", "grep", "mktemp", "rm", "sed", "sort", "tail", "mkdir", "cp")
UV = next(line for line in (REQUIREMENTS / "dev.lock").read_text().splitlines() if line.startswith("uv=="))
TORCH = next(line for line in (REQUIREMENTS / "cpu.lock").read_text().splitlines() if line.startswith("torch=="))


class Machine:
    """A machine whose programs are written by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "bin").mkdir()
        for tool in TOOLS:
            (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))

    def add(self, path: str, script: str) -> str:
        """Add a program that writes its call down and then runs `script`."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#!{shutil.which("bash")}\necho "{file.name} $*" >>"{self.calls}"\n{script}\n')
        file.chmod(0o755)
        return str(file)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a script of requirements/ on this machine."""
        env = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder), "PYENV_ROOT": str(self.folder / "pyenv")}
        command = [str(shutil.which("bash")), str(REQUIREMENTS / script), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def list_calls(self) -> list[str]:
        """List the calls of the stand-ins in their order."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_python_on_the_path_comes_first(machine: Machine) -> None:
    machine.add("pyenv/versions/3.12.9/bin/python", "")
    expected = machine.add("bin/python3.12", "")
    assert machine.run("find_python.sh").stdout == f"{expected}\n"


def test_the_newest_of_pyenv_comes_after_a_shim_that_does_not_start(machine: Machine) -> None:
    machine.add("bin/python3.12", "exit 127")
    machine.add("bin/python3.13", "")
    machine.add("pyenv/versions/3.12.9/bin/python", "")
    expected = machine.add("pyenv/versions/3.12.10/bin/python", "")
    assert machine.run("find_python.sh").stdout == f"{expected}\n"


def test_3_13_is_taken_where_there_is_no_3_12(machine: Machine) -> None:
    machine.add("bin/python3", "exit 1")
    expected = machine.add("pyenv/versions/3.13.0/bin/python", "")
    assert machine.run("find_python.sh").stdout == f"{expected}\n"


def test_uv_of_the_machine_downloads_one(machine: Machine) -> None:
    downloaded = machine.add("downloaded/python", "")
    machine.add("bin/uv", f'[ "$2" != find ] || echo "{downloaded}"')
    assert machine.run("find_python.sh").stdout == f"{downloaded}\n"
    assert machine.list_calls()[:2] == ["uv python install 3.12", "uv python find --managed-python 3.12"]


def test_an_older_python_installs_uv_to_download_one(machine: Machine) -> None:
    downloaded = machine.add("downloaded/python", "")
    uv = machine.add("uv", f'[ "$2" != find ] || echo "{downloaded}"')
    pip = machine.add("python", f'cp "{uv}" "${{0%/*}}/uv"')
    machine.add("bin/python3", f'mkdir -p "$3/bin" && cp "{pip}" "$3/bin/python"')
    assert machine.run("find_python.sh").stdout == f"{downloaded}\n"
    assert f"python -m pip --disable-pip-version-check install --quiet {UV}" in machine.list_calls()


@pytest.mark.parametrize("uv", ["exit 1", '[ "$2" != find ]'], ids=["no download", "no Python"])
def test_one_message_says_that_there_is_none(machine: Machine, uv: str) -> None:
    machine.add("bin/uv", uv)
    process = machine.run("find_python.sh")
    assert (process.returncode, process.stdout) == (2, "")
    first, last = process.stderr.splitlines()
    assert first == "there is no Python 3.12 or 3.13 on the PATH or in pyenv: uv downloads one"
    assert last.startswith("no Python 3.12 could be downloaded; install one")
    assert last.endswith("make PYTHON=...")


def test_a_chosen_python_is_the_only_one(machine: Machine) -> None:
    machine.add("bin/python3.12", "")
    assert machine.run("find_python.sh", sys.executable).stdout == f"{sys.executable}\n"
    process = machine.run("find_python.sh", "/usr/bin/false")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("Python 3.12 or newer is needed")
    assert "/usr/bin/false" in process.stderr


def test_make_refuses_an_interpreter_before_it_installs(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    command = ["make", f"VENV={venv}", "PYTHON=/usr/bin/false", f"{venv}/.runtime"]
    # The options of a make that runs these tests are not those of this one.
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    process = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "Python 3.12 or newer is needed" in process.stderr
    assert not venv.exists()


# A Python of an environment whose uv and pip succeed, except for calls that contain a text.
INSTALLER = '[[ -z "{fails}" || "$*" != *{fails}* ]]'


def test_uv_installs(machine: Machine) -> None:
    python = machine.add("venv/bin/python", "")
    assert machine.run("uv_or_pip.sh", str(machine.folder / "venv"), "--no-deps", "a==1").returncode == 0
    calls = [call.removeprefix("python -m ") for call in machine.list_calls()]
    assert calls[-2:] == [
        f"pip --disable-pip-version-check --quiet install {UV}",
        f"uv --quiet pip install --python {python} --compile-bytecode --no-deps a==1",
    ]


@pytest.mark.parametrize("fails", [UV, "uv --quiet"], ids=["no uv", "uv fails"])
def test_pip_installs_where_uv_does_not(machine: Machine, fails: str) -> None:
    machine.add("venv/bin/python", INSTALLER.format(fails=f"'{fails}'"))
    process = machine.run("uv_or_pip.sh", str(machine.folder / "venv"), "--no-deps", "a==1")
    assert (process.returncode, process.stderr) == (0, "uv did not install them: now pip tries, which takes longer\n")
    assert machine.list_calls()[-1] == "python -m pip --disable-pip-version-check --quiet install --no-deps a==1"


def test_what_neither_installs_is_an_error(machine: Machine) -> None:
    machine.add("venv/bin/python", INSTALLER.format(fails="a==1"))
    assert machine.run("uv_or_pip.sh", str(machine.folder / "venv"), "a==1").returncode != 0


def test_uv_reads_the_index_of_pip(machine: Machine) -> None:
    configured = """global.index-url='https://mirror.example/simple'"""
    machine.add("venv/bin/python", f'[[ "$*" != *list ]] || echo "{configured}"; echo "$UV_DEFAULT_INDEX" >>"$0.log"')
    machine.run("uv_or_pip.sh", str(machine.folder / "venv"), "a==1")
    assert (machine.folder / "venv/bin/python.log").read_text().split() == ["https://mirror.example/simple"] * 2


LABELLED = f"{TORCH}+cpu"
OF_PYTORCH = "whl/cpu"
PUBLIC = f"--constraint {REQUIREMENTS / 'cuda.lock'} {TORCH}"
LOCKED = f"--no-deps --requirement {REQUIREMENTS / 'cpu.lock'}"
VISION = next(
    line for line in (REQUIREMENTS / "cuda.lock").read_text().splitlines() if line.startswith("torchvision==")
)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("installed", [LOCKED, VISION]),
        ("configured", [LABELLED, LOCKED, VISION]),
        ("pytorch", [LABELLED, OF_PYTORCH, LOCKED, VISION]),
        ("public", [LABELLED, OF_PYTORCH, PUBLIC, LOCKED, VISION]),
    ],
)
def test_the_cpu_build_of_torch_comes_from_any_index(machine: Machine, state: str, expected: list[str]) -> None:
    answers = {
        "installed": "",
        "configured": '[[ "$*" != *"assert torch"* ]]',
        "pytorch": f'[[ "$*" != *"assert torch"* && ( "$*" != *{LABELLED}* || "$*" == *{OF_PYTORCH}* ) ]]',
        "public": f'[[ "$*" != *"assert torch"* && "$*" != *{LABELLED}* ]]',
    }
    machine.add("venv/bin/python", answers[state])
    assert machine.run("install_cpu.sh", str(machine.folder / "venv")).returncode == 0
    marks = ("import torch", "config list", UV)
    calls = [call for call in machine.list_calls() if not any(mark in call for mark in marks)]
    assert len(calls) == len(expected)
    for call, part in zip(calls, expected, strict=True):
        assert part in call


def test_torchvision_is_of_the_build_of_torch_or_left_out(machine: Machine) -> None:
    machine.add("venv/bin/python", f'[[ "$*" == *"import torch;"* ]] && echo +cpu; [[ "$*" != *{VISION}* ]]')
    process = machine.run("install_cpu.sh", str(machine.folder / "venv"))
    assert process.returncode == 0
    assert f"no index that is reached has {VISION}+cpu, without which vLLM serves no Qwen3.5" in process.stderr
    calls = [call for call in machine.list_calls() if VISION in call]
    assert [OF_PYTORCH in call for call in calls] == [False, True]


def test_the_installed_torch_counts_only_in_the_locked_version(machine: Machine) -> None:
    machine.add("venv/bin/python", "")
    machine.run("install_cpu.sh", str(machine.folder / "venv"))
    question = next(call for call in machine.list_calls() if "import torch" in call)
    code = question.removeprefix("python -c ")
    torch = "import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__='{}'); "
    for version, counts in ((f"{TORCH.removeprefix('torch==')}+cpu", True), ("2.0.0", False)):
        process = subprocess.run([sys.executable, "-c", torch.format(version) + code], check=False, capture_output=True)
        assert (process.returncode == 0) == counts
