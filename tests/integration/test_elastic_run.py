"""Whole runs to which engines are added and from which they are removed, while the others sample."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

from megatron_grpo.engines import main
from megatron_grpo.run.engine_requests import read_states
from tests.integration.runs import TrainingRun

pytestmark = pytest.mark.slow

PROMPTS = 16
ENDLESS = (f"grpo.num_prompts_per_step={PROMPTS}", "grpo.max_num_steps=100000", "grpo.val_period=0")
ENDLESS += ("grpo.max_val_samples=64", "checkpointing.enabled=false", "logger.rollouts=all")
PREEMPTION = 2  # Ray's number of this reason to drain a node
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


def end(run: TrainingRun) -> list[dict[str, Any]]:
    """End a run, of which no prompt is lost; its metrics."""
    (run.run_dir / "stop").touch()
    assert run.finish(120) == 0, run.log()
    run.assert_nothing_left()
    rows = run.metrics()
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(rows) + 1))
    assert {row["failed_rollouts"] for row in rows} == {0}
    prompts = [list(dict.fromkeys(rollout["prompt_idx"] for rollout in run.rollouts(step))) for step in steps]
    assert [len(of_step) for of_step in prompts] == [PROMPTS] * len(steps)
    drawn = [idx for of_step in prompts for idx in of_step]
    assert len(set(drawn)) == len(drawn), "each prompt is used once"
    return rows


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
    rows = end(run)
    for row in rows:
        if recipe == "quickstart":  # others learn from tokens of earlier weights
            assert row["token_mult_prob_error_max"] < 1.001, "what is sampled is sampled from the policy's weights"
    steps = [row["step"] for row in rows]
    by_step = {step: {rollout["engine"] for rollout in run.rollouts(step)} for step in steps}
    assert by_step[1] == {0}
    assert {0, 1} in [by_step[step] for step in range(first, last)]
    assert by_step[steps[-1]] == {1}
    lag = 0 if recipe == "quickstart" else 1
    for step in steps:
        versions = {span[2] for rollout in run.rollouts(step) for span in rollout["spans"]}
        assert versions <= set(range(step - 1 - lag, step)), f"step {step}"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the run joins a cluster of another process
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    yield nodes
    nodes.shutdown()


def test_engines_follow_a_node_that_joins_and_drains(nodes: Cluster, tmp_path: Path) -> None:
    ray_keys = (f"cluster.ray_address={nodes.address}", "cluster.gpus_per_node=0", "generation.elastic=true")
    run = TrainingRun(tmp_path / "run", *ENDLESS, *ray_keys)
    run.start()
    wait_for_steps(run, 2)
    assert serving(run) == [0]
    node = nodes.add_node(num_cpus=8).node_id
    run.wait_for(lambda: "generation engine 1 serves version" in run.log(), START_S)
    first = count_steps(run) + 1
    wait_for_steps(run, 3)
    assert serving(run) == [0, 1]
    deadline = int((time.time() + 3600) * 1000)
    assert GcsClient(address=nodes.address).drain_node(node, PREEMPTION, "a test", deadline)[0]
    run.wait_for(lambda: "generation engine 1 has left the run" in run.log())
    last = count_steps(run) + 1
    wait_for_steps(run, 3)
    assert serving(run) == [0]
    rows = end(run)
    by_step = {row["step"]: {rollout["engine"] for rollout in run.rollouts(row["step"])} for row in rows}
    assert by_step[1] == by_step[len(rows)] == {0}
    assert {0, 1} in [by_step[step] for step in range(first, last)]
    assert run.log().count("generation engine 1 is being started") == 1
