"""Requests for more or fewer engines, and the command that makes them."""

import json
import time
from pathlib import Path

import pytest

from megatron_grpo.cluster.heartbeat import Heartbeat
from megatron_grpo.engines import main
from megatron_grpo.run.directory import lock_run_directory
from megatron_grpo.run.engine_requests import (
    EngineRequest,
    EngineState,
    EngineStates,
    read_states,
    take_requests,
    write_request,
    write_states,
)

TWO = EngineStates([EngineState(0, "serving", "10.0.0.1", restarts=2), EngineState(3, "serving", "10.0.0.2")])
LEAVING = EngineStates([EngineState(0, "leaving", unfinished=7), EngineState(3, "serving"), EngineState(4, "starting")])


def make_run(folder: Path, states: EngineStates | None = TWO, *, beat: float = 1.0) -> Path:
    """A run's folder whose driver on another machine wrote its heartbeat `beat` seconds ago."""
    record = Heartbeat("driver", 1, "node", "another machine", time.time() - beat, (), 0.0, None)
    beats = folder / "logs" / "heartbeats"
    beats.mkdir(parents=True)
    (beats / "driver.json").write_text(json.dumps({name: getattr(record, name) for name in record.__slots__}))
    if states is not None:
        write_states(folder, states)
    return folder


def test_requests_come_once_in_their_order(tmp_path: Path) -> None:
    make_run(tmp_path)
    requests = [EngineRequest(), EngineRequest(remove=3), EngineRequest(remove=0, now=True)]
    for request in requests:
        write_request(tmp_path, request)
    assert list(take_requests(tmp_path)) == requests
    assert list(take_requests(tmp_path)) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"remove": "all"}', "\x00"])
def test_what_is_no_request_is_named_and_removed(content: str, tmp_path: Path) -> None:
    make_run(tmp_path)
    file = tmp_path / "engines" / "requests" / "0.json"
    file.write_text(content)
    write_request(tmp_path, EngineRequest())
    assert list(take_requests(tmp_path)) == [
        f"{file} is no request of python -m megatron_grpo.engines",
        EngineRequest(),
    ]
    assert not file.exists()


def test_a_start_forgets_what_an_earlier_one_was_asked(tmp_path: Path) -> None:
    run, elsewhere = make_run(tmp_path / "run"), tmp_path / "elsewhere"
    write_request(run, EngineRequest())
    with lock_run_directory(str(run)):
        assert list(take_requests(run)) == []
        with pytest.raises(FileNotFoundError):
            read_states(run)
    elsewhere.mkdir()
    (run / "engines").symlink_to(elsewhere)
    with lock_run_directory(str(run)):
        write_states(run, TWO)
    assert list(elsewhere.iterdir()) == [], "a link may lead to a folder of the user's"


def test_list_shows_every_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(make_run(tmp_path / "run", LEAVING))]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["engine", "state", "node", "replaced", "unfinished", "rollouts"],
        ["0", "leaving", "-", "0", "7"],
        ["3", "serving", "-", "0", "0"],
        ["4", "starting", "-", "0", "0"],
    ]


def test_add_and_remove_ask_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    for words in (["add", str(run)], ["remove", str(run), "3"], ["remove", str(run), "0", "--now"]):
        assert main(words) == 0
    assert list(take_requests(run)) == [EngineRequest(), EngineRequest(3), EngineRequest(0, now=True)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("states", "words", "message"),
    [
        (TWO, ["remove", "RUN", "7"], "7 is the number of no engine that serves; there is 0, 3"),
        (TWO, ["remove", "RUN", "-1"], "-1 is not an argument"),
        (LEAVING, ["remove", "RUN", "4"], "4 is the number of no engine that serves; there is 0, 3"),
        (LEAVING, ["remove", "RUN", "3"], "engine 3 is the last one that serves"),
        (EngineStates(TWO.engines, "they are shared"), ["add", "RUN"], "neither added nor removed: they are shared"),
        (None, ["add", "RUN"], "has no engines, or has not begun its first step"),
        (TWO, ["remove", "RUN"], "see --help"),
        (TWO, ["grow", "RUN"], "see --help"),
        (TWO, ["add", "RUN", "--now"], "--now belongs to remove"),
        (TWO, [], "see --help"),
        (TWO, ["list", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    states: EngineStates | None, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", states)
    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(take_requests(run)) == []


def test_a_run_that_has_ended_is_asked_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", beat=3600.0)
    assert main(["add", str(run)]) == 2
    assert "no run is alive" in capsys.readouterr().err
    assert list(take_requests(run)) == []
