"""Environments of the library verifiers, in an interpreter of their own; its command writes their rows.

python -m megatron_grpo.environments.verifiers PYTHON ENVIRONMENT ROWS [--arguments JSON] [--split test]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, list_import_folders

ROW = "verifiers_row"  # column with the environment's own row
_PROGRAM = Path(__file__).with_name("verifiers_program.py")
# Variables that would make the other interpreter import this one's packages, or give it the run's token.
_WITHHELD = ("PYTHONPATH", "PYTHONHOME", "MEGATRON_GRPO_TOKEN")


class VerifiersProcess:
    """A process of the other interpreter, which has loaded an environment.

    RunError: the interpreter cannot start, or the environment cannot be loaded.
    """

    def __init__(self, python: str, environment: str, arguments: dict[str, Any], folders: tuple[str, ...]) -> None:
        settings = json.dumps({"environment": environment, "arguments": arguments, "folders": folders})
        variables = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        # The library calls `uv`, which is installed beside the interpreter.
        variables["PATH"] = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        command = [python, "-P", str(_PROGRAM), settings]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=variables
            )
        except OSError as error:
            raise RunError(f"options.python={python} cannot be started: {error.strerror}") from None
        self._read_answer()

    def run(self, row: dict[str, Any], access: ModelAccess) -> dict[str, Any]:
        """Run and score a rollout; RunError: it failed, or the process ended."""
        request = {"row": row, "url": access.base_url, "token": access.token, "model": access.model}
        answer = self._ask(request)
        if answer["error"] is not None:
            raise RunError(f"verifiers: {answer['error']}")
        return answer

    def list_rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Iterate the environment's rows: prompt, answer, and its own row."""
        answer = self._ask({"rows": split})
        while "row" in answer:
            yield {"prompt": answer["prompt"], "answer": answer["answer"], ROW: answer["row"]}
            answer = self._read_answer()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says so
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise RunError(f"verifiers: its process ended with status {self._process.wait()}; its log says why")
        answer: dict[str, Any] = json.loads(line)
        if answer.keys() == {"error"}:
            raise RunError(f"verifiers: {answer['error']}")
        return answer


@dataclass(eq=False)
class VerifiersEnvironment(Environment):
    """Reward of an environment of verifiers, which asks the model through the endpoint.

    Rollout, tools and scoring are the library's. The metrics are those of its reward functions.
    """

    agent = True
    needs_columns = (ROW,)
    settings: EnvironmentSettings
    python: str
    """Interpreter that has verifiers and the environment, such as /home/me/vf/bin/python."""
    environment: str
    """Name of the environment, as `load_environment` takes it; from verifiers 0.4 on, of the taskset."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of `load_environment`; from verifiers 0.4 on, the fields of the environment's configuration."""
    correct_at: float | None = None
    """Least reward of a correct response; None: whether a response is correct is unknown."""

    def __post_init__(self) -> None:
        self._process = self._start()  # an environment that cannot be loaded ends the start

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Find an interpreter that does not exist."""
        python = options["python"]
        reason = "is no program; give the bin/python of an environment in which verifiers is installed"
        return [] if os.access(python, os.X_OK) and os.path.isfile(python) else [(f"python={python}", reason)]

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        if self._process.has_ended:
            self._process = self._start()
        return self._process.run(extra_env_info[ROW], access)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        rewards = [request.state["reward"] for request in requests]
        return [
            EnvironmentReturn(
                reward=reward,
                correct=None if self.correct_at is None else reward >= self.correct_at,
                metrics=request.state["metrics"],
            )
            for request, reward in zip(requests, rewards, strict=True)
        ]

    def _start(self) -> VerifiersProcess:
        return VerifiersProcess(self.python, self.environment, self.arguments, self.settings.import_folders)


def write_rows(process: VerifiersProcess, split: str, file: Path) -> int:
    """Write the environment's rows as JSON lines; returns their number."""
    count = 0
    with file.open("w", encoding="utf-8") as lines:
        for row in process.list_rows(split):
            lines.write(json.dumps(row) + "\n")
            count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", help="interpreter that has verifiers and the environment")
    parser.add_argument("environment", metavar="ENVIRONMENT", help="its name, or that of a taskset")
    parser.add_argument("rows", metavar="ROWS", type=Path, help="file that gets the rows, as JSON lines")
    parser.add_argument("--arguments", type=json.loads, default={}, help="as env.NAME.options.arguments, in JSON")
    parser.add_argument("--split", choices=["train", "test"], default="train")
    options = parser.parse_args(arguments)
    try:
        process = VerifiersProcess(options.python, options.environment, options.arguments, list_import_folders())
        count = write_rows(process, options.split, options.rows)
    except RunError as error:
        sys.exit(f"error: {error}")
    print(f"{options.rows}: {count} rows")


if __name__ == "__main__":
    main()
