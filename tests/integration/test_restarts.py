"""Ranks die or hang at every moment of a run: it goes on under its engines, and ends as if nothing had happened."""

import signal
from pathlib import Path

import pytest

from tests.integration.runs import SHORT, TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete, read_options

OPTIONS = read_options("restarts")
FAULTY = "tests.integration.faulty_ranks"
KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)


def faulty_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, faults: str, *overrides: str, recipe: str = "quickstart"
) -> TrainingRun:
    """A run to its end, in whose driver faults happen (tests/integration/faulty_ranks.py)."""
    monkeypatch.setenv("FAULTS", faults)
    run = complete(TrainingRun(run_dir, *overrides, recipe=recipe, module=FAULTY), timeout_s=900)
    run.assert_nothing_left()
    return run


def expect_same_run(run: TrainingRun, straight: TrainingRun, restarts: list[str]) -> None:
    """To the last digit; `restarts`: where each of its restarts goes back to."""
    warnings = [line for line in run.log().splitlines() if line.startswith("restart ")]
    assert len(warnings) == len(restarts), run.log()
    for number, (warning, start) in enumerate(zip(warnings, restarts, strict=True), start=1):
        assert warning.startswith(f"restart {number} of ")
        assert f"; all ranks start again, and the run goes back to {start}" in warning
        assert "Traceback" not in warning
    assert without_timing(run.metrics()) == without_timing(straight.metrics())
    name = "validation.jsonl"
    validations = [read_jsonl(folder / name) for folder in (run.run_dir, straight.run_dir) if (folder / name).exists()]
    assert without_timing(validations[0]) == without_timing(validations[-1])
    last = run.metrics()[-1]["step"]
    assert run.rollouts(last) == straight.rollouts(last)


def test_a_rank_that_dies_in_training_costs_the_steps_since_the_checkpoint(
    straight_run: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = faulty_run(tmp_path / "run", monkeypatch, f"training:5:{KILL}", *SHORT)
    expect_same_run(run, straight_run, ["step 3"])
    assert "restart 1 of 2 (cluster.max_restarts): training step: policy rank " in run.log()
    assert "died (its process is gone)" in run.log()
    assert [start["resumed_after"] for start in read_jsonl(run.run_dir / "starts.jsonl")] == [None, 3]


@pytest.fixture(scope="module")
def light_run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Four steps of two minibatches each, without interruption."""
    folder = tmp_path_factory.mktemp("light")
    return complete(TrainingRun(folder / "run", *OPTIONS["every_moment"]), timeout_s=900)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        f"generation:1:{KILL},validation:1:{KILL}",  # the first one before there is a checkpoint
        f"log-probabilities:2:{KILL},restart:1:{KILL},training:5:{STOP},checkpoint:4:{KILL}",
    ],
)
def test_a_rank_that_dies_at_any_other_moment_or_hangs(
    faults: str, light_run: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = faulty_run(tmp_path / "run", monkeypatch, faults, *OPTIONS["every_moment"])
    assert run.log().count("fault at ") == faults.count(",") + 1, run.log()
    expect_same_run(run, light_run, list_starts(run))
    assert len(list_starts(run)) == faults.count(",") + 1


def list_starts(run: TrainingRun) -> list[str]:
    """Where each restart goes back to, by its warning."""
    warnings = [line for line in run.log().splitlines() if line.startswith("restart ")]
    return [warning.partition("the run goes back to ")[2].partition(";")[0] for warning in warnings]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "asynchronous", "colocated"])
def test_other_loops_and_placements(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, fault = ("quickstart_ppo", f"training:5:{KILL}") if name == "ppo" else ("quickstart", f"training:3:{KILL}")
    straight = complete(TrainingRun(tmp_path / "straight", *OPTIONS[name], recipe=recipe), timeout_s=900)
    if name == "ppo":
        monkeypatch.setenv("FAULTY_VALUE", "1")
    run = faulty_run(tmp_path / "run", monkeypatch, fault, *OPTIONS[name], recipe=recipe)
    assert len(list_starts(run)) == 1, run.log()
    if name == "asynchronous":  # the weights under a response depend on the clock
        assert [row["step"] for row in run.metrics()] == [row["step"] for row in straight.metrics()]
        assert read_prompts(run) == read_prompts(straight), "a prompt is lost or repeated"
    else:
        expect_same_run(run, straight, list_starts(run))


def read_prompts(run: TrainingRun) -> list[list[int]]:
    """The rows of each step's prompts."""
    steps = [row["step"] for row in run.metrics()]
    return [sorted({row["prompt_idx"] for row in run.rollouts(step)}) for step in steps]


@pytest.mark.slow
def test_without_restarts_left_the_run_ends_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTS", f"training:2:{KILL},training:3:{KILL}")
    run = TrainingRun(tmp_path / "run", *SHORT, "cluster.max_restarts=1", module=FAULTY)
    assert run.finish(600) == 1, run.log()
    run.assert_nothing_left()
    message = run.log().strip().splitlines()[-1]
    assert message.startswith("run failed: training step: policy rank ")
    assert message.endswith("; ranks were restarted as often as cluster.max_restarts=1 allows")
    assert "Traceback" not in run.log()
