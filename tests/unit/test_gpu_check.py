"""benchmarks/gpu_check.py: verdicts, deadlines, going on with a result; and the table, whose rows run something."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GPU = "NVIDIA Made Up, 81559 MiB, 580.1, 9.0"
CALL = """
import sys
sys.path.insert(0, {benchmarks!r})
from gpu_check import main
from gpu_checks import Check
sys.exit(main(sys.argv[1:], ({rows},)))
"""
RIGHT = "def test_right(): ...\n"
OUTCOMES = """
import pytest

def test_right(record_property):
    record_property("gigabytes", 7)

def test_wrong():
    assert 1 == 2, "one is not two"

@pytest.fixture
def broken():
    raise OSError("no such file")

def test_without_its_fixture(broken): ...

def test_too_large():
    pytest.skip("needs 3 GPUs")
"""
COUNTED = """
from pathlib import Path

def test_counted():
    with Path({file!r}).open("a") as file:
        file.write("ran ")
    assert {right}
"""
HANGS = """
import subprocess, sys, time
from pathlib import Path

def test_before(): ...

def test_hangs():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path({file!r}).write_text(str(sleeper.pid))
    time.sleep(600)
"""
DRY = """
import os
import pytest

def test_dry():
    assert (os.environ["GPU_CHECK_DRY"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")

def test_without_numbers():
    pytest.skip("dry: two steps")
"""
Call = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Runs rows of a table, given as Python, on a machine with made-up GPUs: exit code, the result, standard error."""

    def run(rows: str, *options: str, gpus: tuple[str, ...] = (GPU,)) -> tuple[int, dict[str, Any], str]:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text("".join(["#!/bin/sh\n", *(f"echo '{gpu}'\n" for gpu in gpus)]))
        tool.chmod(0o755)
        variables = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment = variables | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
        file = tmp_path / "result.json"
        code = CALL.format(benchmarks=str(BENCHMARKS), rows=rows)
        command = [sys.executable, "-c", code, "--result", str(file), *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        return ended.returncode, json.loads(file.read_text()) if file.exists() else {}, ended.stderr

    return run


def row(file: Path, text: str, settings: str = "") -> str:
    """A row of the table by the name of its file of tests, which is written."""
    file.write_text(text)
    return f"Check(name={file.stem.removeprefix('test_')!r}, part='image', run={str(file)!r}, {settings})"


def by_name(check: dict[str, Any]) -> dict[str, Any]:
    """The tests of a check."""
    return {name.partition("::")[2]: test for name, test in check["tests"].items()}


def test_every_outcome_of_a_check_is_told(call: Call, tmp_path: Path) -> None:
    code, result, _ = call(row(tmp_path / "test_made_up.py", OUTCOMES))
    assert code == 1
    assert (result["gpus"], result["dry"]) == ([GPU], False)
    assert result["versions"]["torch"]
    check = result["checks"]["made_up"]
    assert check.keys() == {"verdict", "why", "tests", "seconds", "commit", "ended"}
    assert check["verdict"] == "fail"
    assert check["why"].startswith("2 failed, first ")
    tests = by_name(check)
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "test_right": "pass",
        "test_wrong": "fail",
        "test_without_its_fixture": "fail",
        "test_too_large": "not run",
    }
    assert tests["test_right"]["numbers"] == {"gigabytes": 7}
    assert "one is not two" in tests["test_wrong"]["why"]
    assert "no such file" in tests["test_without_its_fixture"]["why"]
    assert tests["test_too_large"]["why"] == "needs 3 GPUs"


@pytest.mark.slow
def test_a_check_that_hangs_is_killed_with_all_that_it_started(call: Call, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = row(tmp_path / "test_hangs.py", HANGS.format(file=str(pid)), "deadline_s=20.0")
    code, result, _ = call(f"{hangs}, {row(tmp_path / 'test_next.py', RIGHT)}")
    assert code == 1
    tests = by_name(result["checks"]["hangs"])
    assert tests["test_before"]["verdict"] == "pass"
    assert tests["test_hangs"] == {"verdict": "fail", "why": "killed after 20 s, its deadline"}
    assert not psutil.pid_exists(int(pid.read_text()))
    assert result["checks"]["next"]["verdict"] == "pass"


def test_a_later_call_goes_on_with_what_is_missing(call: Call, tmp_path: Path) -> None:
    """What had no time before, and failed checks if asked to; never what has passed."""
    counts = {name: tmp_path / name for name in ("right", "wrong")}
    right, wrong = (
        row(tmp_path / f"test_{name}.py", COUNTED.format(file=str(file), right=name == "right"))
        for name, file in counts.items()
    )
    two = row(tmp_path / "test_two.py", RIGHT, "gpus=2")
    absent = row(tmp_path / "test_absent.py", RIGHT, "needs=('no_such.module', 'psutil')")
    rows = f"{right}, {two}, {absent}, {wrong}"
    assert call(rows, "--minutes", "0")[:2] == (3, {})
    code, result, _ = call(rows)
    assert code == 1
    reasons = [result["checks"][name]["why"] for name in ("two", "absent")]
    assert reasons == ["needs 2 GPUs, and this machine has 1", "needs no_such.module"]
    for again in ([], ["--again", "failed"]):
        code, result, _ = call(rows, *again, gpus=(GPU,))
        assert code == 1
        assert result["checks"]["right"]["verdict"] == "pass"
    assert {name: file.read_text() for name, file in counts.items()} == {"right": "ran ", "wrong": "ran ran "}


def test_chosen_checks_run_alone_in_their_order(call: Call, tmp_path: Path) -> None:
    """Where a machine is there for minutes; a later call goes on with the others."""
    names = ("first", "second", "third")
    record = tmp_path / "record"
    text = "from pathlib import Path\n\ndef test_it():\n    with Path({!r}).open('a') as file: file.write('{} ')\n"
    rows = ", ".join(row(tmp_path / f"test_{name}.py", text.format(str(record), name)) for name in names)
    assert call(rows, "--only", "third", "first")[0] == 0
    assert record.read_text() == "third first "
    assert call(rows, "--only", "first")[0] == 0, "again, although the file has its verdict"
    code, result, _ = call(rows)
    assert (code, record.read_text()) == (0, "third first first second ")
    assert result["checks"].keys() == {*names}
    code, _, output = call(rows, "--only", "failed")
    assert code == 2
    assert "--only failed: no such check; there are first, second, third" in output


def test_a_result_of_another_machine_is_left_alone(call: Call, tmp_path: Path) -> None:
    rows = row(tmp_path / "test_two.py", RIGHT, "gpus=2")
    assert call(rows)[0] == 0
    before = (tmp_path / "result.json").read_text()
    code, _, output = call(rows, gpus=(GPU, GPU))
    assert code == 1
    assert "result.json differs from this machine in gpus; give another --result" in output
    assert (tmp_path / "result.json").read_text() == before
    code, _, output = call(rows, "--again", "tow")
    assert code == 2
    assert "--again tow: no such check; there are two" in output


@pytest.mark.slow
def test_a_check_that_has_no_time_is_left_for_the_next_call(call: Call, tmp_path: Path) -> None:
    quick = row(tmp_path / "test_quick.py", RIGHT)
    long = row(tmp_path / "test_long.py", "import time\n\ndef test_long():\n    time.sleep(600)\n")
    code, result, _ = call(f"{quick}, {long}", "--minutes", "0.4")
    assert code == 3
    assert result["checks"].keys() == {"quick"}


def test_a_dry_run_needs_no_gpu(call: Call, tmp_path: Path) -> None:
    stands_in = row(tmp_path / "test_dry.py", DRY, "gpus=8, needs=('transformer_engine_torch',), dry='cpu'")
    right_tests = row(tmp_path / "test_real.py", RIGHT)
    code, result, _ = call(f"{stands_in}, {right_tests}", "--dry", gpus=())
    assert (code, result["dry"]) == (0, True)
    assert (result["checks"]["dry"]["verdict"], result["checks"]["dry"]["dry"]) == ("dry", "cpu")
    assert [test["verdict"] for test in by_name(result["checks"]["dry"]).values()] == ["dry", "dry"]
    assert result["checks"]["real"]["why"] == "needs a GPU: nothing stands in for it"


def test_without_a_gpu_nothing_is_checked(call: Call, tmp_path: Path) -> None:
    assert call(row(tmp_path / "test_right.py", RIGHT), gpus=())[:2] == (0, {})


def test_a_benchmark_that_fails_or_prints_no_json_is_told(call: Call) -> None:
    paths = {"missing": "benchmarks/no_such.py", "silent": "benchmarks/header.py"}
    code, result, _ = call(", ".join(f"Check(name={n!r}, part='image', run={path!r})" for n, path in paths.items()))
    assert code == 1
    assert "no_such.py" in result["checks"]["missing"]["why"]
    assert result["checks"]["silent"]["why"] == "printed no JSON: "


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield import_module("gpu_checks")
    sys.modules.pop("gpu_checks", None)


def test_every_row_runs_a_file_in_time_and_is_in_the_document(table: Any) -> None:
    assert len({check.name for check in table.CHECKS}) == len(table.CHECKS)
    page = (ROOT / "docs" / "gpu.md").read_text()
    for check in table.CHECKS:
        assert f"| {check.name} |" in page
        for command in filter(None, (check.run, check.dry_run)):
            assert (ROOT / shlex.split(command)[0].partition("::")[0]).is_file(), command
        assert check.deadline_s < 600, "some machines end a command after ten minutes"
        if check.part == "torch_only":
            assert not {"ray", "vllm", "transformer_engine_torch"} & {*check.needs}


def test_every_test_of_a_gpu_is_in_a_row(table: Any) -> None:
    run = {check.run.split()[0].partition("::")[0] for check in table.CHECKS}
    assert run >= {str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").rglob("test_*.py")}


@pytest.mark.slow
def test_tests_that_need_torch_alone_are_loaded_without_ray_and_vllm() -> None:
    """They were written without; an import in what they use once made every one fail on the first real GPU."""
    blocked = "import sys, pytest; sys.modules.update(ray=None, vllm=None, datasets=None, fastapi=None)"
    collect = "sys.exit(pytest.main(['tests/gpu/torch_only', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    ended = subprocess.run([sys.executable, "-c", f"{blocked}; {collect}"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:]
