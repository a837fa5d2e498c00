"""Options of whole runs, and runs that end well."""

import subprocess
import sys
from pathlib import Path

import yaml

from tests.integration.runs import TrainingRun

_OPTIONS = yaml.safe_load((Path(__file__).parents[1] / "data" / "run_options.yaml").read_text())


def read_options(file: str) -> dict[str, list[str]]:
    """The options in tests/data/run_options.yaml of a file of tests, by their name."""
    options: dict[str, list[str]] = _OPTIONS[file]
    return options


def complete(run: TrainingRun, timeout_s: float = 480.0) -> TrainingRun:
    """Wait until a run has ended without an error."""
    assert run.finish(timeout_s) == 0, run.log()
    return run


def export(checkpoint: Path, output: Path) -> Path:
    """Export a checkpoint; returns the folder of the model."""
    command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={checkpoint}", f"output={output}"]
    subprocess.run(command, check=True, timeout=300)
    return output


def kill_after(run: TrainingRun, step: int) -> TrainingRun:
    """Kill a run once it has written the checkpoint of a step; nothing of it is left."""
    run.start()
    run.wait_for(lambda: (run.run_dir / "checkpoints" / f"step_{step}").exists())
    run.kill()
    run.assert_nothing_left()
    return run
