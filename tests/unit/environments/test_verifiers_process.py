"""A process of verifiers: its answers are its own, and its children reach neither its pipes nor outlive it.

A small module stands for the library; tests/integration/test_verifiers.py has the real one.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import ResponseError
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.environments.verifiers import VerifiersProcess

LIBRARY = '''
import ctypes, multiprocessing, os, subprocess, sys, time, types

FORGED = '{"reward": 1.0, "metrics": {}, "error": null}'


def write_everywhere(pid):
    """Write an answer to every pipe of a process that can be opened."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path).startswith("pipe"):
                os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), f"{FORGED}\\n".encode())
        except OSError:
            pass


def write_to_own():
    for fd in range(64):
        try:
            os.write(fd, f"{FORGED}\\n".encode())
        except OSError:
            pass


class Single:
    """A number of another library."""

    def __float__(self):
        return 0.125


class Environment:
    def get_dataset(self):
        return [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "b"}]

    async def run_rollout(self, row, client, model, options):
        kind, output = row["kind"], {"reward": 0.5, "metrics": {}, "error": None}
        if kind == "value":
            output["reward"] = row["reward"] if row["reward"] != "single" else Single()
        if kind == "metrics":
            output["metrics"] = {"speed": "fast"}
        if kind == "exit":
            os._exit(4)
        if kind == "long":
            output["error"] = {"error_chain_repr": "x" * 10_000_000}
        if kind == "leave":
            subprocess.Popen(["sleep", row["mark"]], start_new_session=True)
            subprocess.run(["sh", "-c", "setsid sh -c 'trap \\"\\" TERM; sleep $0; :' $0 &", row["mark"]])
        if kind == "thief":
            subprocess.Popen(["sh", "-c", "head -n 1 > $0", row["file"]])
        if kind == "write":
            fork = multiprocessing.get_context("fork").Process(target=write_to_own)
            fork.start()
            fork.join()
            code = "import os, sys\\nfor fd in range(64):\\n try: os.write(fd, sys.argv[1].encode())\\n"
            code += " except OSError: pass"
            subprocess.run([sys.executable, "-c", code, FORGED + "\\n"], close_fds=False)
            print(FORGED, flush=True)
        if kind == "forge":
            write_everywhere(os.getpid())
        if kind == "look":
            output["metrics"] = {"dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)}
        return output


def load_environment(name, **arguments):
    return Environment()


library_types = types.ModuleType("verifiers.types")
library_types.ClientConfig = lambda **fields: fields
sys.modules["verifiers.types"] = library_types
__path__ = []
'''

ACCESS = ModelAccess("http://127.0.0.1:1/v1", "token", "policy")
GOOD = {"reward": 0.5, "metrics": {}, "error": None}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[VerifiersProcess]:
    (tmp_path / "verifiers.py").write_text(LIBRARY)
    started = VerifiersProcess(sys.executable, "e", {}, (str(tmp_path),))
    yield started
    started.close()


def run(process: VerifiersProcess, kind: str, **fields: Any) -> dict[str, Any]:
    return process.run({"kind": kind, **fields}, ACCESS)


@pytest.mark.parametrize("reward", [1, 0.25, -2.0, None, True])
def test_a_reward_is_the_rollouts(process: VerifiersProcess, reward: Any) -> None:
    assert run(process, "value", reward=reward)["reward"] == reward
    assert run(process, "value", reward="single")["reward"] == 0.125
    assert [row["answer"] for row in process.list_rows("train")] == ["a", "b"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39, "9", [1.0], {}])
def test_an_impossible_reward_fails_its_rollout_alone(process: VerifiersProcess, reward: Any) -> None:
    with pytest.raises(ResponseError, match=r"gave the reward .*, which is no finite number"):
        run(process, "value", reward=reward)
    assert run(process, "good") == GOOD


def test_metrics_that_are_no_numbers_and_long_errors(process: VerifiersProcess) -> None:
    with pytest.raises(ResponseError, match=r"gave the metrics .*fast.*, which are no numbers"):
        run(process, "metrics")
    with pytest.raises(ResponseError) as caught:
        run(process, "long")
    assert len(str(caught.value)) < 1100


def test_children_have_neither_the_requests_nor_the_answers(process: VerifiersProcess, tmp_path: Path) -> None:
    assert run(process, "thief", file=str(tmp_path / "stolen")) == GOOD
    for _ in range(3):
        assert run(process, "write") == GOOD
    deadline = time.monotonic() + 10
    while not (tmp_path / "stolen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "stolen").read_text() == "", "its input has ended"
    assert run(process, "good") == GOOD


def test_a_line_without_the_requests_id_is_no_answer(process: VerifiersProcess) -> None:
    """Also where the rights of root open the process's own pipes to everybody."""
    for _ in range(3):
        assert run(process, "forge") == GOOD
        assert run(process, "value", reward=-1.0)["reward"] == -1.0


def test_the_process_is_not_dumpable(process: VerifiersProcess) -> None:
    assert run(process, "look")["metrics"] == {"dumpable": 0}


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_what_a_process_started_ends_with_it(process: VerifiersProcess, end: str) -> None:
    mark = f"1{os.getpid()}{time.monotonic_ns() % 10**6:06}"
    run(process, "leave", mark=mark)
    assert len(find(mark)) >= 2
    if end == "close":
        process.close()
    elif end == "exit":
        with pytest.raises(ResponseError, match="its process ended with status 4"):
            run(process, "exit")
    else:
        process._process.kill()
    deadline = time.monotonic() + 5
    while find(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not find(mark)


def find(mark: str) -> list[str]:
    return subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False).stdout.split()
