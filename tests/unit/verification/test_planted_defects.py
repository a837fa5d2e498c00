"""The doctor on defects besides those of its own tests: none is called healthy, and no wrong cause is given.

The engine and the trainer of every run are transformers, so a defect is what a case says and nothing else. Cases are
in tests/data/planted_defects.yaml, and `python -m tests.support.planted.table` prints the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo import doctor
from megatron_grpo.observability.run_files import read_lines
from tests.support.planted.cases import CASES, DEFECTS, HEALTHY, Case, examine, fresh, verdict
from tests.support.planted.runs import RUNS
from tests.support.recorded_runs import RecordedRun, sampled


def cases_of(cases: Sequence[Any]) -> list[Any]:
    """Parameters of a test."""
    return [pytest.param(one, id=one.name, marks=[] if one.fast else pytest.mark.slow) for one in cases]


MakeRun = Callable[..., RecordedRun]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RecordedRun]:
    """Runs by name, each made once."""
    runs: dict[str, RecordedRun] = {}

    def of_name(name: str) -> RecordedRun:
        if name not in runs:
            runs[name] = RUNS[name](tmp_path_factory.mktemp("run"))
        return runs[name]

    return of_name


@pytest.fixture
def make(made: Callable[[str], RecordedRun], tmp_path: Path) -> MakeRun:
    """Makes a run with an empty record, by its name and changes of its configuration."""
    return lambda name, *overrides: fresh(made(name), tmp_path, *overrides)


@pytest.mark.parametrize("case", cases_of(DEFECTS))
def test_a_defect_is_named(case: Case, make: MakeRun) -> None:
    run = make(case.run, *case.overrides)
    case.plant(run)
    answer = examine(run)
    judged = verdict(case, answer)
    assert judged == "named" or (judged.startswith("unnamed") and not case.must), f"{judged}: {answer.texts}"
    assert answer.code in (1, 2)
    assert (answer.code == 1) == bool(answer.found), "a refusal has no object, and a finding has one"
    assert "Traceback" not in answer.errors


@pytest.mark.parametrize("case", cases_of(HEALTHY))
def test_a_healthy_run_is_clean(case: Case, make: MakeRun) -> None:
    run = make(case.run, *case.overrides)
    case.plant(run)
    answer = examine(run)
    assert answer.code == 0, answer.texts
    assert answer.found["findings"] == []


def test_rollouts_of_a_version_that_is_gone_are_counted(make: MakeRun) -> None:
    """Nothing is wrong in the rollouts that can be scored, and the exit code says that these are not all."""
    run = make("dense")
    newest = len(run.versions) - 1
    drawn = sampled(run.versions[newest], run.prompts(), version=newest)
    gone = [replace(one, spans=[span._replace(version=7) for span in one.spans]) for one in drawn[:3]]
    run.write(newest + 1, [*gone, *drawn[3:]])
    answer = examine(run)
    assert (answer.code, answer.found["findings"], answer.found["unseen_rollouts"]) == (3, [], 3)
    assert any("of version 7; 3 rollouts have no other tokens" in remark for remark in answer.found["remarks"])


def test_the_engine_of_the_rollouts_that_differ_is_named(make: MakeRun) -> None:
    run = make("dense")
    newest = len(run.versions) - 1
    right, behind = (sampled(run.versions[number], run.prompts(), version=newest) for number in (newest, newest - 1))
    run.write(
        newest + 1, [replace(one, engine=1) for one in behind[:4]] + [replace(one, engine=0) for one in right[4:]]
    )
    assert "(in 4 of 8 rollouts: all of engine 1)" in examine(run).texts


def test_there_are_enough_kinds() -> None:
    assert len({one.name for one in DEFECTS}) == len(DEFECTS) >= 20
    assert sum(one.must for one in DEFECTS) >= 0.8 * len(DEFECTS)
    assert len({one.name for one in HEALTHY}) == len(HEALTHY) >= 12


def test_a_recomputed_figure_has_not_the_name_of_the_recorded_one(
    make: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (leak,) = [one for one in CASES["trainers"] if one.name == "packed sequences leak"]
    run = make(leak.run)
    leak.plant(run)
    recorded = read_lines(run.run_dir / "metrics.jsonl")[-1]["token_mult_prob_error"]
    assert recorded > 1.1, "the leak shows"
    doctor.main([str(run.run_dir)])
    text = capsys.readouterr().out
    figures = [float(one) for one in re.findall(r"token_mult_prob_error[ =:]+([\d.]+\d)", text)]
    assert figures, text
    assert figures == pytest.approx([recorded] * len(figures), rel=1e-3)
