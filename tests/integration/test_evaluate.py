"""Evaluation of a real checkpoint: what validation found, found again from the exported weights; and compared."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.runs import TrainingRun, read_jsonl


def evaluate(*words: object) -> dict[str, Any]:
    """Run the command; what it wrote into its output, and the samples."""
    command = [sys.executable, "-m", "megatron_grpo.evaluate", *map(str, words)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stdout + process.stderr
    (output,) = [Path(str(word).partition("=")[2]) for word in words if str(word).startswith("output=")]
    assert sorted(path.name for path in output.iterdir()) == ["logs", "results.json", "samples.jsonl"]
    return json.loads((output / "results.json").read_text()) | {"rows": read_jsonl(output / "samples.jsonl")}


@pytest.fixture(scope="module")
def prompts(straight_run: TrainingRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The held-out prompts that the run validated with."""
    file = tmp_path_factory.mktemp("prompts") / "held_out.jsonl"
    config = yaml.safe_load((straight_run.run_dir / "config.yaml").read_text())
    lines = Path(config["data"]["val_path"]).read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: config["grpo"]["max_val_samples"]]))
    return file


@pytest.fixture(scope="module")
def greedy(straight_run: TrainingRun, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the most likely answers of the last checkpoint are."""
    output = tmp_path_factory.mktemp("evaluations") / "greedy"
    evaluate(f"checkpoint={straight_run.run_dir}/checkpoints/step_6", f"data.val_path={prompts}", f"output={output}")
    return output


@pytest.mark.ci
@pytest.mark.slow  # a command starts an engine of its own
def test_an_evaluation_finds_what_validation_found(straight_run: TrainingRun, greedy: Path) -> None:
    *_, validated = read_jsonl(straight_run.run_dir / "validation.jsonl")
    results = json.loads((greedy / "results.json").read_text())
    figures = results["sets"]["held_out"]
    assert (figures["prompts"], results["temperature"]) == (64, 0.0)
    assert figures["accuracy"]["mean"] == pytest.approx(validated["val_accuracy"], abs=1e-12)
    assert figures["metrics"]["response_length"] == validated["val_response_length"]


@pytest.mark.ci
@pytest.mark.slow
def test_several_samples_are_compared_with_one(
    straight_run: TrainingRun, prompts: Path, greedy: Path, tmp_path: Path
) -> None:
    *_, validated = read_jsonl(straight_run.run_dir / "validation.jsonl")
    sampled = evaluate(
        f"checkpoint={straight_run.run_dir}/checkpoints/step_6",
        f"data.val_path={prompts}",
        "samples=4",
        "k=[1,4]",
        f"compare={greedy}",
        f"output={tmp_path / 'sampled'}",
    )
    figures = sampled["sets"]["held_out"]
    assert len(sampled["rows"]) == 4 * 64
    assert figures["pass@1"]["mean"] == pytest.approx(figures["accuracy"]["mean"])
    assert figures["pass@4"]["mean"] > figures["pass@1"]["mean"]
    right = [any(row["correct"] for row in sampled["rows"][start : start + 4]) for start in range(0, 256, 4)]
    assert figures["pass@4"]["mean"] == pytest.approx(sum(right) / 64)
    compared = sampled["compared"]["sets"]["held_out"]
    assert (compared["prompts"], compared["accuracy_before"]) == (64, pytest.approx(validated["val_accuracy"]))
