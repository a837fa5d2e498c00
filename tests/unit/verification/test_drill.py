"""The drill: its cells, the phases that it waits for, its verdicts and its checks of what a run has written."""

import random
import sys
from pathlib import Path

import pytest

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER
from megatron_grpo.cluster.process_log import LOGS_FOLDER
from megatron_grpo.drill import main
from megatron_grpo.verification.drill.cells import (
    ACTIONS,
    PHASES,
    PROCESSES,
    Cell,
    choose_cells,
    identify_phase,
    is_of_kind,
    parse_cells,
)
from megatron_grpo.verification.drill.drilled_run import DrilledRun
from megatron_grpo.verification.drill.table import format_row, format_rows
from megatron_grpo.verification.drill.trials import ENDED, RECOVERED, SKIPPED, Limits, Trial, try_cell
from megatron_grpo.verification.drill.written_records import compare_prompts

LIMITS = Limits(deadline_s=1.0, recovery_s=5.0, startup_s=20.0)


def test_cells_are_named_with_wildcards_in_the_order_given() -> None:
    assert parse_cells(["driver:stop:refit", "policy:kill:training"]) == [
        Cell("driver", "stop", "refit"),
        Cell("policy", "kill", "training"),
    ]
    assert len(parse_cells(["*"])) == len(PROCESSES) * len(ACTIONS) * len(PHASES)
    assert parse_cells(["policy:kill:training", "policy:k*:t*"]) == [Cell("policy", "kill", "training")]
    assert {cell.process for cell in parse_cells(["engine*:end"])} == {"engine", "engine_core", "engine_worker"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("polcy:kill", "cells has polcy; did you mean policy"),
        ("policy:kill:training:now", "has 4 parts"),
        ("policy::training", "cells has "),
    ],
)
def test_cells_that_do_not_exist_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cells([pattern])


def test_a_choice_is_that_of_its_seed_and_keeps_the_order() -> None:
    cells = parse_cells(["*"])
    chosen = choose_cells(cells, 9, random.Random(3))
    assert chosen == choose_cells(cells, 9, random.Random(3)) != choose_cells(cells, 9, random.Random(4))
    assert sorted(chosen, key=cells.index) == chosen
    assert len({*chosen}) == 9
    assert choose_cells(cells, None, random.Random(0)) == cells


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (["step 7", "train", "training step"], "training"),
        (["step 7", "refit", "refit", "comparing weights"], "refit"),
        (["step 7", "generation"], "generation"),
        (["step 7", "environment"], "generation"),
        (["step 7", "logprobs"], "logprobs"),
        (["generation"], "validation"),
        (["checkpoint"], "checkpoint"),
        (["refit"], None),  # the first one, before any step
        (["step 7"], None),
        ([], None),
    ],
)
def test_the_phase_of_a_run_follows_from_its_driver(phases: list[str], expected: str | None) -> None:
    assert identify_phase(phases) == expected


def test_processes_are_told_apart_by_their_names() -> None:
    names = {
        "policy rank 12": "policy",
        "value model rank 0": "value",
        "generation engine 0": "engine",
        "generation engine 0 core": "engine_core",
        "generation engine 3 worker 1": "engine_worker",
        "rollout worker 0": "rollout_worker",
        "environment addition worker 5893": "environment",
        "driver": "driver",
    }
    for name, process in names.items():
        assert [kind for kind in PROCESSES if is_of_kind(name, kind)] == [process]


def test_prompts_are_lost_or_come_twice() -> None:
    order = [4, 0, 3, 1, 2]
    assert compare_prompts([4, 0, 3], order) == []
    assert compare_prompts([0, 4, 3], order) == []  # of one step, in any order
    assert compare_prompts([4, 3, 1], order) == ["1 prompts are lost, of rows [0]"]
    assert compare_prompts([4, 0, 0], order) == ["1 prompts are lost, of rows [3]", "1 prompts came twice"]
    assert compare_prompts([4, 0, 3, 1, 2, 0, 4], order) == []  # the second epoch has another order


def test_the_table_counts_by_process_and_action() -> None:
    kill = Cell("policy", "kill", "training")
    trials = [
        Trial(kill, RECOVERED, victim="policy rank 1", seconds=20.0),
        Trial(kill, RECOVERED, victim="policy rank 0", seconds=30.0),
        Trial(Cell("driver", "kill", "refit"), ENDED, seconds=1.0, exit_code=-9, message="lost", resume_s=60.0),
        Trial(Cell("driver", "kill", "training"), ENDED, seconds=1.0, problems=["left behind: raylet"]),
    ]
    assert format_rows(trials).splitlines()[2:] == [
        "| policy | kill | 2 | 2: 25 |  |  | 0 |",
        "| driver | kill | 2 |  | 2: 1 | 1: 60 | 1 |",
    ]
    assert format_row(trials[3]).splitlines()[1].strip() == "left behind: raylet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cells=[polcy]"], "did you mean policy"),
        (["count=0"], "count=0 must be > 0"),
        (["deadline_s=soon"], "deadline_s=soon must be"),
        (["grpo.num_promts_per_step=3"], "did you mean grpo.num_prompts_per_step"),
        (["run_dir=."], "is there already"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


# A process that writes what a run of training writes: its heartbeats by the product's own writer, steps and starts.
# FAULT: what it does about the loss of its rank, which is a process of its own.
SCRIPT = f"""if True:
    import json, os, subprocess, sys, time
    from pathlib import Path
    from megatron_grpo.cluster.heartbeat import HeartbeatWriter
    from megatron_grpo.cluster.phases import phase
    folder, outcome = Path(sys.argv[1]), sys.argv[2]
    beats = folder / "{LOGS_FOLDER}" / "{HEARTBEATS_FOLDER}"
    metrics, starts = folder / "metrics.jsonl", folder / "starts.jsonl"
    HeartbeatWriter(beats, "driver", sys.stderr).start()
    rank_code = (
        "import sys, time; from pathlib import Path; from megatron_grpo.cluster.heartbeat import HeartbeatWriter;"
        "HeartbeatWriter(Path(sys.argv[1]), 'policy rank 0', sys.stderr).start(); time.sleep(60)"
    )
    def start_rank():
        return subprocess.Popen([sys.executable, "-c", rank_code, str(beats)])
    rank = start_rank()
    step = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    with starts.open("a") as file:
        file.write(json.dumps({{"resumed_after": step or None}}) + "\\n")
    while not (folder / "stop").exists():
        step += 1
        with phase(f"step {{step}}"), phase("training step"):
            time.sleep(0.3)
        if rank.poll() is not None:
            if outcome == "restarts":
                rank = start_rank()
            elif outcome != "goes on":
                print("run failed: policy rank 0 died", flush=True)
                print("run failed: twice" if outcome == "talks" else "", flush=True)
                if outcome == "leaves":
                    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
                os._exit(3 if outcome == "wrong code" else 1)
        with metrics.open("a") as file:
            file.write(json.dumps({{"step": step}}) + "\\n")
    rank.kill()
"""


class ScriptedRun(DrilledRun):
    """A run whose process is SCRIPT."""

    def __init__(self, run_dir: Path, outcome: str) -> None:
        super().__init__(run_dir, [])
        self._command = [sys.executable, "-c", SCRIPT, str(run_dir), outcome]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def drill(folder: Path, outcome: str, cell: Cell) -> Trial:
    run = ScriptedRun(folder, outcome)
    try:
        run.start()
        assert run.wait_for(lambda: bool(run.find_processes("policy")), LIMITS.startup_s), run.read_output()
        assert run.wait_for(lambda: run.read_step() >= 1, LIMITS.startup_s), run.read_output()
        trial = try_cell(run, cell, LIMITS, random.Random(0))
        if run.is_alive and trial.verdict != SKIPPED:
            assert run.read_step() > (trial.step or 0)
        return trial
    finally:
        run.ask_to_end()
        run.wait_for_end(5.0)
        run.end_by_force()
        assert run.list_remains(within_s=5.0) == []


def test_a_run_that_goes_on_with_all_its_processes_has_recovered(folder: Path) -> None:
    trial = drill(folder, "restarts", Cell("policy", "kill", "training"))
    assert (trial.verdict, trial.victim, trial.problems) == (RECOVERED, "policy rank 0", [])
    assert trial.has_passed
    assert trial.step is not None
    assert trial.seconds is not None


@pytest.mark.parametrize(
    ("outcome", "problems"),
    [
        ("ends", []),
        ("talks", ["the run has ended with 2 messages"]),
        ("wrong code", ["exit code 3"]),
    ],
)
def test_a_run_that_ends_must_say_so_once(outcome: str, problems: list[str], folder: Path) -> None:
    trial = drill(folder, outcome, Cell("policy", "kill", "training"))
    assert (trial.verdict, trial.problems) == (ENDED, problems)
    assert trial.has_passed == (not problems)
    assert trial.message is not None
    assert trial.resume_s is not None  # it was started again


def test_processes_that_stay_behind_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.verification.drill.trials.REMAINS_S", 1.0)
    trial = drill(folder, "leaves", Cell("policy", "kill", "training"))
    assert [problem.partition(": ")[0] for problem in trial.problems] == ["left behind"]


def test_a_run_that_goes_on_without_its_process_has_not_recovered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_grpo.verification.drill.trials.SUMMARY_S", 0.1)
    trial = drill(folder, "goes on", Cell("policy", "kill", "training"))
    assert trial.verdict == ENDED
    assert "neither a step nor an end within 5 s: driver is " in trial.problems[0]


def test_a_driver_that_was_stopped_for_a_while_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.verification.drill.trials.PAUSE_S", 0.5)
    trial = drill(folder, "ends", Cell("driver", "stop", "training"))
    assert (trial.verdict, trial.problems) == (RECOVERED, [])


def test_a_phase_or_process_that_does_not_come_is_no_success(folder: Path) -> None:
    trial = drill(folder, "ends", Cell("value", "kill", "training"))
    assert (trial.verdict, trial.has_passed) == (SKIPPED, False)
    assert trial.message == "there is no such process of the run on this machine"
