"""Whole runs of ECHO, CHORD and self-distillation: their figures, and a resume to the last digit."""

from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, without_timing
from tests.integration.whole_runs import complete, kill_after, read_options
from tests.support.documents import undocumented

OPTIONS = read_options("mixture_runs")

pytestmark = pytest.mark.slow


def mixture_run(run_dir: Path, name: str, *overrides: str) -> TrainingRun:
    """A short run; the options of a name begin with its recipe."""
    recipe, *options = OPTIONS[name]
    return TrainingRun(run_dir, *OPTIONS["short"], *options, *overrides, recipe=recipe)


@pytest.mark.parametrize("name", ["echo", "chord", "self_distillation"])
def test_it_learns_and_resumes_to_the_last_digit(name: str, tmp_path: Path) -> None:
    straight = complete(mixture_run(tmp_path / "straight", name))
    straight.assert_nothing_left()
    rows = straight.metrics()
    assert undocumented(rows[-1].keys() - {"step", "timing", "throughput"}) == set()
    assert all(row["optimizer_steps"] == 1 for row in rows)
    if name == "chord":
        assert rows[0]["demonstration_weight"] > rows[-1]["demonstration_weight"] > 0
        assert rows[-1]["demonstration_nll"] < rows[0]["demonstration_nll"]
    elif name == "echo":
        assert rows[-1]["environment_nll"] < rows[0]["environment_nll"]
    else:
        assert all(row["loss"] == row["teacher_divergence"] > 0 for row in rows)
    kill_after(mixture_run(tmp_path / "run", name), 2)
    second = complete(mixture_run(tmp_path / "run", name))
    assert "resumed after step" in second.log()
    assert without_timing(second.metrics()) == without_timing(rows)
    assert second.rollouts(len(rows)) == straight.rollouts(len(rows))
