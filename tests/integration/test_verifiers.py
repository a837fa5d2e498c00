"""Environments of the real library verifiers through a real endpoint: rows, turns, tools, scores, failures.

VERIFIERS_PYTHON names an interpreter with verifiers from 0.4 on and uv, VERIFIERS_CLASSIC_PYTHON one with 0.3.1,
NEMO_GYM_PYTHON one with nemo-gym.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.verifiers import ROW, VerifiersEnvironment
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.endpoint import Endpoint, EndpointSettings

FOLDER = Path(__file__).parents[1] / "support" / "verifiers_environments"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
VARIABLES = ("VERIFIERS_CLASSIC_PYTHON", "VERIFIERS_PYTHON", "NEMO_GYM_PYTHON")
CLASSIC, TASKSETS, NEMO_GYM = (os.environ.get(name, "") for name in VARIABLES)
needs_classic = pytest.mark.skipif(not CLASSIC, reason="VERIFIERS_CLASSIC_PYTHON names no interpreter with 0.3.1")
needs_tasksets = pytest.mark.skipif(not TASKSETS, reason="VERIFIERS_PYTHON names no interpreter with verifiers 0.4")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(CHARACTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


class Engine:
    """A model that writes the texts of a script."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.prompts = [*texts], list[list[int]]()

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.prompts.append(request.prompt_ids.tolist())
        text = self.texts.pop(0)
        ids = np.array([CHARACTERS.index(letter) for letter in text], dtype=np.int32)
        spans = [Span(0, len(ids), 1)]
        return GenerationOutput(token_ids=ids, logprobs=-ids / 8, text=text, stop_reason="stop", spans=spans)


class Calls:
    """A parser: "double 3" calls the tool."""

    def check_tools(self, tools: Any, variables: Any) -> None:
        pass

    def read(self, tools: Any, variables: Any, token_ids: Any, text: str, number: int) -> dict[str, Any]:
        if (match := re.fullmatch(r"double (\d+)", text)) is None:
            return {"role": "assistant", "content": text}
        assert [tool["function"]["name"] for tool in tools] == ["double"]
        function = {"name": "double", "arguments": json.dumps({"n": int(match[1])})}
        call = {"id": "call0", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def open_environment(python: str, name: str, **options: Any) -> Any:
    values = {"python": python, "environment": name, **options}
    settings = EnvironmentSettings(import_folders=(str(FOLDER),))
    return create_environment(EnvironmentConfig(type="verifiers", options=values), settings)


def play(
    environment: Any, row: dict[str, Any], texts: list[str], tokenizer: Any
) -> tuple[EnvironmentReturn, list[str]]:
    """Play a rollout; returns its score and the prompts that the engine got."""
    engine = Engine(texts)

    async def run() -> Any:
        endpoint = Endpoint(EndpointSettings(host="127.0.0.1", port=0, token="secret", tokenizer=tokenizer))
        await endpoint.start()
        endpoint.texts.reader.parser = cast("Any", Calls())
        renderer = endpoint.get_renderer("task", PromptFormat())
        sampling = SamplingSettings(max_new_tokens=40, temperature=0.5)
        conversation = Conversation(cast("Any", engine), sampling, renderer, lambda turn: turn, 1000)
        try:
            with endpoint.open_rollout(conversation) as access:
                return await asyncio.to_thread(environment.act, row["prompt"], row, access)
        finally:
            await endpoint.runner.cleanup()

    state = asyncio.run(run())
    request = EnvironmentRequest(prompt="", response="", stop_reason="stop", state=state, extra_env_info=row)
    assert engine.texts == [], "all of the script was asked for"
    return environment.score([request])[0], [tokenizer.decode(prompt) for prompt in engine.prompts]


def list_rows(environment: VerifiersEnvironment, split: str = "train") -> list[dict[str, Any]]:
    return list(environment._process.list_rows(split))


@needs_classic
def test_a_single_turn_is_scored_by_its_rubric(tokenizer: Any) -> None:
    environment = open_environment(CLASSIC, "classic_sums", correct_at=1.0)
    rows = list_rows(environment)
    assert [row["answer"] for row in rows] == ["0", "2", "4", "6"]
    assert len(list_rows(environment, "test")) == 2
    score, prompts = play(environment, rows[3], ["6"], tokenizer)
    assert prompts == ["system: Add.\nuser: 3+3=\n"]
    assert (score.reward, score.correct) == (1.0 + 0.5 / 2, True)
    assert score.metrics == {"exact": 1.0, "short": 0.5, "num_turns": 1.0}
    score, _ = play(environment, rows[3], ["seven"], tokenizer)
    assert (score.reward, score.correct) == (pytest.approx(0.5 / 6), False)


@needs_classic
def test_tools_are_called(tokenizer: Any) -> None:
    environment = open_environment(CLASSIC, "classic_sums", arguments={"kind": "tools"})
    row = list_rows(environment)[3]
    score, prompts = play(environment, row, ["double 3", "6"], tokenizer)
    assert prompts[1].endswith("tool: 6\n")
    assert (score.reward, score.correct) == (1.25, None)
    assert score.metrics["double_calls"] == 1


@needs_classic
def test_turns_go_on_until_the_environment_ends_them(tokenizer: Any) -> None:
    environment = open_environment(CLASSIC, "classic_sums", arguments={"kind": "turns"})
    row = list_rows(environment)[2]
    score, prompts = play(environment, row, ["5", "4"], tokenizer)
    assert prompts[1] == "user: 2+2=\n5\nuser: wrong\n"
    assert score.metrics["num_turns"] == 2
    score, _ = play(environment, row, ["5", "6", "44"], tokenizer)
    assert score.reward == pytest.approx(0.5 / 3), "three turns are its most"


@needs_classic
def test_failures_are_those_of_the_rollout(tokenizer: Any) -> None:
    environment = open_environment(CLASSIC, "classic_sums", arguments={"kind": "turns"})
    row = list_rows(environment)[2]
    with pytest.raises(RunError, match="the world is gone"):
        play(environment, row, ["raise"], tokenizer)
    with pytest.raises(RunError, match="its process ended with status 3"):
        play(environment, row, ["die"], tokenizer)
    assert play(environment, row, ["4", "4"][:1], tokenizer)[0].metrics["num_turns"] == 1, "another process"
    with pytest.raises(RunError, match="no_such_environment"):
        open_environment(CLASSIC, "no_such_environment")


@needs_tasksets
def test_a_taskset_is_scored_by_its_tasks(tokenizer: Any) -> None:
    environment = open_environment(TASKSETS, "taskset_sums", arguments={"taskset": {"rows": 4}})
    rows = list_rows(environment)
    assert [(row["prompt"], row[ROW]["idx"], row[ROW]["total"]) for row in rows] == [
        (f"{n}+{n}=", n, 2 * n) for n in range(4)
    ]
    score, prompts = play(environment, rows[3], ["6"], tokenizer)
    assert prompts == ["user: 3+3=\n"]
    assert (score.reward, score.metrics["length"]) == (2.0, 1.0)
    assert play(environment, rows[3], ["seven"], tokenizer)[0].reward == 0.0
    with pytest.raises(RunError, match="has no splits"):
        list_rows(environment, "test")


@pytest.mark.skipif(not (TASKSETS and NEMO_GYM), reason="NEMO_GYM_PYTHON names no interpreter with nemo-gym")
def test_a_resources_server_of_nemo_gym_verifies_responses(tokenizer: Any, tmp_path: Path) -> None:
    question = {"input": [{"role": "user", "content": "Which is even?\nA: 1\nB: 2"}]}
    options: list[dict[str, str]] = [{"A": "1"}, {"B": "2"}]
    row = {"responses_create_params": question, "options": options, "expected_answer": "B", "uuid": "0"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "grading_mode": "strict_single_letter_boxed"}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen([NEMO_GYM, str(FOLDER.parent / "nemo_gym_server.py"), str(port)])
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        taskset = {"dataset": str(tmp_path / "rows.jsonl"), "task": {"resources_url": f"http://127.0.0.1:{port}"}}
        environment = open_environment(TASKSETS, "nemo_gym", arguments={"taskset": taskset})
        (gym_row,) = list_rows(environment)
        for text, reward in (("\\boxed{B}", 1.0), ("\\boxed{A}", 0.0)):
            score, prompts = play(environment, gym_row, [text], tokenizer)
            assert prompts == ["user: Which is even?\nA: 1\nB: 2\n"]
            assert score.reward == reward
    finally:
        server.kill()
        server.wait()


@needs_tasksets
def test_commands_of_the_model_do_not_run_on_this_machine() -> None:
    with pytest.raises(RunError, match=r"harness bash runs commands of the model.*give a container"):
        open_environment(TASKSETS, "taskset_sums", arguments={"agent": {"harness": {"id": "bash"}}})


@needs_classic
def test_the_documented_command_writes_the_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_grpo.environments.verifiers", CLASSIC, "classic_sums", "rows.jsonl"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(FOLDER)])
    result = subprocess.run(
        [*command, "--split", "test"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout == "rows.jsonl: 2 rows\n"
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert (first["answer"], first[ROW]["info"]) == ("0", {"n": 0})


def test_a_python_that_does_not_exist_is_a_problem() -> None:
    options = {"python": "/nowhere/python", "environment": "x"}
    ((name, reason),) = VerifiersEnvironment.option_problems(options)
    assert name == "python=/nowhere/python"
    assert "give the bin/python of an environment in which verifiers is installed" in reason
