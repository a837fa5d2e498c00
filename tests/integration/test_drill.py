"""A drill of two faults in a real run: a rank that restarts, and a driver whose run is started again."""

import json
from pathlib import Path

import pytest

from megatron_grpo.drill import main


@pytest.mark.slow
def test_a_rank_and_the_driver_are_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    code = main(["cells=[policy:kill:training,driver:kill:generation]", "deadline_s=30", f"run_dir={run_dir}"])
    assert code == 0, capfd.readouterr().out + run_dir.with_name("run.log").read_text()
    results = json.loads(run_dir.with_name("run.json").read_text())
    assert (results["passed"], results["problems"]) == (True, [])
    rank, driver = results["trials"]
    assert (rank["verdict"], rank["exit_code"]) == ("recovered", None)
    assert rank["victim"].startswith("policy rank ")
    assert (driver["verdict"], driver["exit_code"], driver["victim"]) == ("ended", -9, "driver")
    assert driver["resume_s"] > 0
    out = capfd.readouterr().out
    assert "| policy | kill | 1 | 1: " in out
    assert "passed: 2 of 2 cells" in out
