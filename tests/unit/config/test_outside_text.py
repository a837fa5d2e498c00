"""Whatever text comes in by any door: a step's files are written, and neither log nor console is steered."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from rich.console import Console

from megatron_grpo.batch.environment_metrics import make_metric_name, name_reported_metrics
from megatron_grpo.batch.rollout_files import RunFacts, StepFacts, StepRecord, read_rows, write_rollouts
from megatron_grpo.cluster.process_log import PrintedText, RecordFormatter
from megatron_grpo.config.command_line import as_command
from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.outside_text import (
    NAME_CHARACTERS,
    NOTE_CHARACTERS,
    REASON_CHARACTERS,
    clean_json,
    describe_error,
    make_encodable,
    make_line,
    make_note,
    parse_json,
    replace_controls,
)
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess, Turn
from megatron_grpo.data.sources import parse_line
from megatron_grpo.environments.environment_worker import MAX_NOTES, EnvironmentWorker
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.mcp_access import format_result
from megatron_grpo.environments.observations import ObservationEncoder
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.environments.verifiers import VerifiersProcess
from megatron_grpo.generation.teacher_client import TeacherServer, pack_row
from megatron_grpo.observability.progress import ProgressDisplay
from megatron_grpo.observability.run_files import format_json_line
from megatron_grpo.rollouts.failures import RolloutFailure, describe_failures
from tests.support.trajectories import make_trajectory

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
FORGED = "2026-11-28 INFO [driver] megatron_grpo: the run is over"
texts = st.one_of(
    st.text(alphabet=st.characters(codec=None), max_size=60),  # all of Unicode, halves of surrogate pairs too
    st.sampled_from(
        ["\ud83d", "\udc00\ud800", "a\ud83d\ude00", "\x1b]0;title\x07", "\x9b2J", "\r", "\0", "\u202e", f"\n{FORGED}"]
    ),
    st.builds("".join, st.lists(st.sampled_from(["\x1b[2J", "\ud800", "\n", FORGED, "x" * 700, "é"]), max_size=6)),
)
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


class RaisedError(Exception):
    """An exception whose text is from outside, or cannot be written."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __str__(self) -> str:
        if self._text is None:
            raise ValueError("no text")
        return self._text


def make_worker(**functions: Any) -> EnvironmentWorker:
    worker = EnvironmentWorker("task", EnvironmentConfig(type="reward_functions"), EnvironmentSettings())
    agent = functions.pop("agent", None)
    weights = dict.fromkeys(functions, 1.0)
    environment = RewardFunctionEnvironment(
        functions=functions, weights=weights, correctness=None, agent_function=agent
    )
    worker._environment = environment
    return worker


def score(worker: EnvironmentWorker) -> Any:
    request = EnvironmentRequest(prompt="p", response="r", stop_reason="stop", extra_env_info={})
    return worker.score([request])


def is_line(text: str) -> bool:
    return "\n" not in text and not STEERING.search(text) and text == text.encode().decode()


@given(text=texts)
@quick
def test_every_door_leaves_writable_files(text: str, tmp_path: Path) -> None:
    def log(prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra(text, [text])
        log_metric(text, 1.0)
        return [1.0]

    def fail(**_: Any) -> Any:
        raise RaisedError(text)

    reasons = [
        score(make_worker(f=fail)).reason,
        make_worker(f=fail, agent=fail).act("p", {}, ModelAccess("u", "t", "m")).reason,
        str(RolloutFailure(text)),
    ]
    assert all(is_line(reason) and len(reason) <= REASON_CHARACTERS for reason in reasons)
    (scored,) = score(make_worker(f=log))
    rollouts = [make_trajectory(failure=reason) for reason in reasons]
    rollouts.append(make_trajectory(notes=scored.notes, reward_metrics=scored.metrics, reward_parts=scored.parts))
    for trajectory in rollouts:
        trajectory.task_name = "task"
    record = StepRecord(
        RunFacts(prompts_per_step=1, samples_per_prompt=1, max_num_steps=1, vocab=3, vocabulary=None),
        StepFacts(position={}, longest=3, dropped=[trajectory.outcome for trajectory in rollouts]),
    )
    file = tmp_path / "step_1.parquet"
    write_rollouts(file, [(0, [(trajectory, {}) for trajectory in rollouts])], record.to_metadata())
    rows = list(read_rows(1, file))
    assert [row["failure"] for row in rows] == [*reasons, None]
    assert rows[-1]["notes"] == scored.notes
    line = format_json_line({**scored.metrics, "reason": describe_failures([rollouts[0].outcome])})
    assert line.count("\n") == 1
    assert json.loads(line.encode())


def make_answering_worker(read: list[Any], **methods: Any) -> EnvironmentWorker:
    """A process of an environment whose methods are those of a server's client; `read` gets what the model reads."""
    worker = make_worker()
    worker._environment = SimpleNamespace(**methods)  # type: ignore[assignment]
    renderer = SimpleNamespace(encode_later_turn=lambda messages, last_token: read.append(messages) or [1])
    worker._encoder = ObservationEncoder(renderer, images=None)  # type: ignore[arg-type]
    return worker


def raise_error(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def take_turn(**turn: Any) -> list[Any]:
    """What a model reads of the answer of a tool, an OpenEnv server or another environment with turns."""
    read: list[Any] = []
    worker = make_answering_worker(read, step=lambda state, response: Turn(done=False, **turn))
    answer = worker.step(cloudpickle.dumps(None), "response", 0)
    assert isinstance(answer, Turn), answer
    return read


def read_verifiers(text: str) -> list[Any]:
    process = VerifiersProcess.__new__(VerifiersProcess)
    process._ask = lambda request: {"error": text}  # type: ignore[method-assign]
    worker = make_answering_worker([], act=lambda prompt, info, access: process.run({}, access))
    return [worker.act("p", {}, ModelAccess("u", "t", "m"))]


def read_teacher(text: str) -> list[Any]:
    server = TeacherServer("teacher.server_url", "http://host:1", top_k=1, timeout_s=1.0, policy_folder="")
    row = {"5": {"logprob": text, "rank": text, "decoded_token": text}}
    with pytest.raises(RunError) as caught:
        pack_row(row, server, 10)
    return [replace_controls(str(caught.value))]  # as a command prints it


def read_results(text: str) -> list[Any]:
    types = pytest.importorskip("mcp.types", reason="the extra mcp is not installed")
    tool = json.dumps({"name": text, "title": text, "description": text, "inputSchema": {"type": "object"}})
    content = [{"type": "text", "text": text}, {"type": "resource_link", "uri": text, "name": text, "title": text}]
    try:
        definition = types.Tool.model_validate_json(tool)
        result = types.CallToolResult.model_validate_json(json.dumps({"content": content}))
    except ValueError:  # as the SDK does with a message that holds half of a pair
        return []
    return [definition.model_dump(), format_result(result)]


def answer_with(method: str, answer: Callable[..., Any]) -> Any:
    """What a process answers to a call of a method of its environment."""
    worker = make_answering_worker([], **{method: answer})
    if method == "score":
        return score(worker)
    if method == "step":
        return worker.step(cloudpickle.dumps(None), "response", 0)
    return worker.reset("p", {}) if method == "reset" else worker.act("p", {}, ModelAccess("u", "t", "m"))


DOORS: dict[str, Callable[[str], list[Any]]] = {
    "score": lambda text: answer_with("score", lambda requests: [text]),
    **{
        f"{type(error('')).__name__} of {method}": lambda text, method=method, error=error: [  # type: ignore[misc]
            answer_with(method, raise_error(error(text)))
        ]
        for method in ("score", "step", "reset", "act")
        for error in (RunError, ValueError, RaisedError)
    },
    "verifiers": read_verifiers,
    "teacher": read_teacher,
}
"""Ways by which a text gets into a reason or a message: one line."""
CONTENTS: dict[str, Callable[[str], list[Any]]] = {
    "text of a turn": lambda text: take_turn(text=text or "."),
    "messages of a turn": lambda text: take_turn(
        messages=[{"role": "tool", "name": text, "content": [{"type": "text", "text": text}], text: text}]
    ),
    "MCP server": read_results,
    "row of a data set": lambda text: [parse_line(json.dumps({"prompt": text, text: [text]}).encode())],
}
"""Ways by which a text gets to the model: any, but one that files hold."""


@pytest.mark.parametrize("door", DOORS)
@given(text=texts)
@quick
def test_a_reason_by_any_door_is_a_line(door: str, text: str) -> None:
    (answer,) = DOORS[door](text)
    reason = answer if isinstance(answer, str) else answer.reason
    assert is_line(reason), door
    assert len(reason) <= REASON_CHARACTERS


@pytest.mark.parametrize("door", CONTENTS)
@given(text=texts)
@quick
def test_a_content_by_any_door_can_be_written(door: str, text: str) -> None:
    for content in CONTENTS[door](text):
        json.dumps(content, ensure_ascii=False).encode()


@given(text=texts)
@quick
def test_log_and_console_are_not_steered(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RecordFormatter("%(levelname)s %(message)s"))
    try:
        raise RaisedError(text)
    except RaisedError:
        record = logging.LogRecord("a", logging.INFO, __file__, 1, text, None, sys.exc_info())
    handler.emit(record)
    console = io.StringIO()
    display = ProgressDisplay(3, live=False, console=Console(file=console, force_terminal=True, highlight=False))
    display.print_line(text)
    for written in (stream.getvalue(), console.getvalue()):
        assert not STEERING.search(written)
        assert all(line.startswith("    ") for line in written.split("\n")[1:-1]), "a forged record"
        assert written.encode()


@given(parts=st.lists(texts, max_size=4))
@quick
def test_what_user_code_prints_steers_no_log(parts: list[str]) -> None:
    stream = io.StringIO()
    printed: Any = PrintedText(stream)
    for part in parts:
        print(part, end="", file=printed)
    print(file=printed)
    stream.write("a record\n")
    *lines, record, end = stream.getvalue().split("\n")
    assert (record, end) == ("a record", "")
    assert not STEERING.search(stream.getvalue())
    assert all(line.startswith("    ") for line in lines)


@given(text=texts)
@quick
def test_what_a_command_prints_steers_no_terminal(text: str) -> None:
    @as_command("show", "usage")
    def show(arguments: Any) -> int:
        print(f"remark: {text}")
        return 0

    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert show([]) == 0
    stream.flush()
    written = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert not STEERING.search(written)
    assert written.startswith("remark: ")


def test_notes_of_a_response_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    def log(prompts: list[str], completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        for number in range(5000):
            log_extra(f"note {number}", ["x"])
        return [1.0]

    (scored,) = score(make_worker(f=log))
    assert len(scored.notes) == MAX_NOTES
    assert "environment task: a response has more than 100 notes; the others are left out" in caplog.text


LIKE_NAMES = [
    *("x" * 150 + end for end in ("", "a", "b")),
    *("x" * 80 + middle + "y" * 80 for middle in ("a", "b")),  # where the middle of a line is left out
    *("a" + end for end in ("\x1b", "\x9b", "\n", "\r", "_", "\\n", "\ud800", "\udfff")),
    *("steps/" + part for part in ("", ".", "..", "_", "/_")),
    *("ok", "x" * NAME_CHARACTERS),
]


def test_names_that_are_alike_stay_apart() -> None:
    """Otherwise the value of the last replaces those of the others."""

    def log(prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        for number, name in enumerate(LIKE_NAMES):
            log_extra(name, [str(number)])
            log_metric(name, float(number))
        return [1.0]

    (scored,) = score(make_worker(f=log))
    numbers = range(len(LIKE_NAMES))
    assert list(scored.notes.values()) == list(map(str, numbers))
    assert list(scored.metrics.values()) == list(map(float, numbers))
    assert all(map(is_line, [*scored.notes, *scored.metrics]))
    assert max(map(len, scored.notes)) == NAME_CHARACTERS
    assert {"ok", "x" * NAME_CHARACTERS} < scored.notes.keys()
    assert {"env/ok", "env/steps/_"} < scored.metrics.keys()
    # Each response gives a name the same way, or a step could not average it.
    assert scored.notes.keys() == score(make_worker(f=log))[0].notes.keys()
    first, second = LIKE_NAMES[1:3]
    parts = score(make_worker(**{first: lambda **_: [1.0], second: lambda **_: [2.0]}))[0].parts
    assert list(parts.values()) == [1.0, 2.0]


@given(text=st.text(max_size=200))
@quick
def test_valid_text_stays_as_it_is(text: str) -> None:
    assert make_encodable(text) == text
    assert make_note(text) == text
    assert clean_json([text, {text: text}]) == [text, {text: text}]
    if text.isprintable():
        assert make_line(text) == text


@given(text=texts)
@quick
def test_only_halves_of_pairs_are_replaced(text: str) -> None:
    encodable_text = make_encodable(text)
    encodable_text.encode()
    pairs = json.loads(json.dumps(text))  # Python's reader of JSON joins pairs
    assert encodable_text == "".join("\ufffd" if unicodedata.category(letter) == "Cs" else letter for letter in pairs)
    assert parse_json(json.dumps({text: [text]})) == {encodable_text: [encodable_text]}


@pytest.mark.parametrize("body", ["NaN", "[Infinity]", "{", '{"a":' * 150 + "1" + "}" * 150, "[" * 10**5, b"\xff", b""])
def test_what_is_no_json_is_refused(body: str | bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(body)


def test_lengths() -> None:
    line = make_line("begin" + "\x1b" * 10**7 + "end (file.py:3)")
    assert len(line) == REASON_CHARACTERS
    assert line.startswith("begin\\x1b")
    assert line.endswith("end (file.py:3)")
    assert len(make_note("x" * 10**6)) == NOTE_CHARACTERS
    assert describe_error(RaisedError(None)) == "RaisedError: its text cannot be written (ValueError)"
    ids = list(range(1000))
    assert parse_json(json.dumps(ids)) == ids
    assert np.isclose(name_reported_metrics({"\ud800\x1b": 1.0})[make_metric_name("\ud800\x1b")], 1.0)
    assert isinstance(score(make_worker(f=lambda **_: [1.0]))[0], EnvironmentReturn)
