"""Environments of the library verifiers, in an interpreter of their own; its command writes their rows.

python -m megatron_grpo.environments.verifiers PYTHON ENVIRONMENT ROWS [--arguments JSON] [--split test]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ResponseError, RunError, to_text
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess, is_reward
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.process_guard import wrap_command

ROW = "verifiers_row"  # column with the environment's own row
logger = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("verifiers_program.py")
# Variables that would make the other interpreter import this one's packages, or give it the run's token.
_WITHHELD = ("PYTHONPATH", "PYTHONHOME", "MEGATRON_GRPO_TOKEN")
_MAX_ANSWER_CHARACTERS = 2**26  # of a line; a row may contain images


class VerifiersProcess:
    """A process of the other interpreter, which has loaded an environment.

    RunError: the interpreter cannot start, or the environment cannot be loaded.
    """

    def __init__(self, python: str, environment: str, arguments: dict[str, Any], folders: tuple[str, ...]) -> None:
        settings = json.dumps({"environment": environment, "arguments": arguments, "folders": folders})
        variables = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        # The library calls `uv`, which is installed beside the interpreter.
        variables["PATH"] = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        if not os.access(python, os.X_OK):
            raise RunError(f"options.python={python} cannot be started: it is no program")
        command = wrap_command([python, "-P", str(_PROGRAM), settings])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=variables)
        self._request = ""  # id of the request whose answer comes next
        self._read_answer()

    def run(self, row: dict[str, Any], access: ModelAccess) -> dict[str, Any]:
        """Run and score a rollout; ResponseError: it failed, or the process ended."""
        request = {"row": row, "url": access.base_url, "token": access.token, "model": access.model}
        answer = self._ask(request)
        if answer.get("error") is not None:
            raise ResponseError(f"verifiers: {answer['error']}")
        reward, metrics = answer.get("reward"), answer.get("metrics")
        if reward is not None and not (isinstance(reward, int | float) and is_reward(reward)):
            text = f"verifiers: the environment gave the reward {to_text(reward)}"
            raise ResponseError(f"{text}, which is no finite number")
        if not isinstance(metrics, dict) or not all(isinstance(value, int | float) for value in metrics.values()):
            raise ResponseError(f"verifiers: the environment gave the metrics {to_text(metrics)}, which are no numbers")
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
        """End the process and all that it started at once."""
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._request = secrets.token_hex(16)
        try:
            self._process.stdin.write(json.dumps({"id": self._request, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says so
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        """Read the answer to the last request; lines without its id are not believed."""
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline(_MAX_ANSWER_CHARACTERS)
            if len(line) == _MAX_ANSWER_CHARACTERS:
                self.close()
                raise ResponseError(f"verifiers: its answer has more than {_MAX_ANSWER_CHARACTERS} characters")
            if not line.endswith("\n"):
                text = f"verifiers: its process ended with status {self._process.wait()}"
                raise ResponseError(f"{text}; its log says why")
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            if isinstance(answer, dict) and answer.pop("id", None) == self._request:
                break
            logger.warning("verifiers: left out a line that is no answer to the request: %.200r", line)
        if answer.keys() == {"error"}:
            raise ResponseError(f"verifiers: {answer['error']}")
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
                correct=None if self.correct_at is None or reward is None else reward >= self.correct_at,
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
