"""A whole run to which an engine is added and from which one is removed, while the others sample."""

from pathlib import Path

import pytest

from megatron_grpo.engines import main
from megatron_grpo.run.engine_requests import read_states
from tests.integration.runs import TrainingRun

pytestmark = pytest.mark.slow

PROMPTS = 16
ENDLESS = (f"grpo.num_prompts_per_step={PROMPTS}", "grpo.max_num_steps=100000", "grpo.val_period=0")
ENDLESS += ("grpo.max_val_samples=64", "checkpointing.enabled=false", "logger.rollouts=all")
START_S = 400.0
"""For an engine to start beside a run, on a busy machine."""


def count_steps(run: TrainingRun) -> int:
    return len(run.metrics()) if (run.run_dir / "metrics.jsonl").exists() else 0


def wait_for_steps(run: TrainingRun, steps: int) -> None:
    goal = count_steps(run) + steps
    run.wait_for(lambda: count_steps(run) >= goal)


def serving(run: TrainingRun) -> list[int]:
    """Numbers of the engines that the run says it has."""
    return [engine.number for engine in read_states(run.run_dir).engines]


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_async"])
def test_a_run_goes_on_while_engines_come_and_go(recipe: str, tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", *ENDLESS, recipe=recipe)
    run.start()
    wait_for_steps(run, 2)
    assert main(["add", str(run.run_dir)]) == 0
    run.wait_for(lambda: "generation engine 1 serves version" in run.log(), START_S)
    first = count_steps(run) + 1
    wait_for_steps(run, 3)
    assert serving(run) == [0, 1]
    assert main(["remove", str(run.run_dir), "0"]) == 0
    run.wait_for(lambda: "generation engine 0 has left the run" in run.log())
    last = count_steps(run) + 1
    wait_for_steps(run, 3)
    assert serving(run) == [1]
    assert main(["remove", str(run.run_dir), "1"]) == 2, "it is the last one"
    (run.run_dir / "stop").touch()
    assert run.finish(120) == 0, run.log()
    run.assert_nothing_left()
    rows = run.metrics()
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(rows) + 1))
    for row in rows:
        assert row["failed_rollouts"] == 0
        if recipe == "quickstart":  # others learn from tokens of earlier weights
            assert row["token_mult_prob_error_max"] < 1.001, "what is sampled is sampled from the policy's weights"
    prompts = [list(dict.fromkeys(rollout["prompt_idx"] for rollout in run.rollouts(step))) for step in steps]
    assert [len(of_step) for of_step in prompts] == [PROMPTS] * len(steps)
    drawn = [idx for of_step in prompts for idx in of_step]
    assert len(set(drawn)) == len(drawn), "each prompt is used once"
    by_step = {step: {rollout["engine"] for rollout in run.rollouts(step)} for step in steps}
    assert by_step[1] == {0}
    assert {0, 1} in [by_step[step] for step in range(first, last)]
    assert by_step[steps[-1]] == {1}
    lag = 0 if recipe == "quickstart" else 1
    for step in steps:
        versions = {span[2] for rollout in run.rollouts(step) for span in rollout["spans"]}
        assert versions <= set(range(step - 1 - lag, step)), f"step {step}"
