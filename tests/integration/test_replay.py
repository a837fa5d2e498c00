"""Steps of a real run, done again: the same layout to the last digit, another one within rounding."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo import replay
from megatron_grpo.batch.replay_files import locate_figures_file
from megatron_grpo.batch.rollout_files import find_recorded_steps
from megatron_grpo.verification.replay.compare import TOLERANCES
from tests.integration.runs import TrainingRun
from tests.integration.whole_runs import complete, read_options

OPTIONS = read_options("replay")

SHORT = OPTIONS["short"]


def results(run: TrainingRun, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the comparisons of a replay of step 4."""
    code = replay.main([str(run.run_dir), "step=4", "device=cpu", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["comparisons"]


@pytest.mark.slow
def test_a_recorded_step_comes_out_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = complete(TrainingRun(tmp_path / "run", *SHORT))
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["step_1", "step_3", "step_5"]
    assert list(find_recorded_steps(run.run_dir)) == [2, 4]
    assert all(locate_figures_file(run.run_dir, step).is_file() for step in (2, 4))
    code, (comparison,) = results(run, capsys)
    assert code == 0, comparison
    largest = {entry["quantity"]: entry["difference"] for entry in comparison["differences"]}
    assert largest.keys() == set(TOLERANCES["float32"])
    assert largest["weights"] == 0, "the checkpoint holds the weights that the step began with"
    assert all(difference <= 1e-6 for difference in largest.values()), largest
    code, comparisons = results(run, capsys, "policy.parallel.data=1", "policy.parallel.pipeline=2")
    assert code == 0, comparisons
    assert [(entry["first"], entry["second"]) for entry in comparisons] == [
        ("replayed", "recorded"),
        ("changed", "recorded"),
        ("changed", "replayed"),
    ]
