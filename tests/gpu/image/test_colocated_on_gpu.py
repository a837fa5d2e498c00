"""A whole run on one GPU, which training and the engine have in turn."""

import json
from pathlib import Path

from tests.integration.runs import TrainingRun
from tests.integration.test_replay_runs import REPLAY
from tests.integration.vllm_helpers import ON_GPUS

COLOCATED = (
    f"cluster.gpus_per_node={int(ON_GPUS)}",
    "generation.placement=colocated",
    "generation.engine.gpu_memory_utilization=0.5",
    "policy.parallel.pipeline=1",
    "generation.parallel.pipeline=1",
)


def test_one_gpu_is_enough(tmp_path: Path) -> None:
    """The engine answers with the weights that were trained, after sleeping, and after a checkpoint in between."""
    run = TrainingRun(
        tmp_path / "run", *COLOCATED, "grpo.max_num_steps=6", "checkpointing.save_period=2", "grpo.val_period=3"
    )
    assert run.finish(timeout_s=1200) == 0, run.log()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["token_mult_prob_error_mean"] < 1.02
    assert all({"sleep", "wake", "offload", "onload"} <= row["timing"].keys() for row in run.metrics())
    run.assert_nothing_left()


def test_a_value_model_on_the_same_gpu(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", *COLOCATED, "ppo.max_num_steps=3", recipe="quickstart_ppo")
    assert run.finish(timeout_s=1200) == 0, run.log()
    assert all(row["token_mult_prob_error"] < 1.02 for row in run.metrics())
    run.assert_nothing_left()


def test_responses_in_flight_outlast_the_sleep_of_their_engine(tmp_path: Path) -> None:
    settings = (*COLOCATED, "grpo.max_num_steps=6", "grpo.async_grpo.oversampling_factor=1.5", "grpo.val_period=3")
    settings += ("generation.generation_batch_size=8",)  # so slow that responses are in flight when a step begins
    run = TrainingRun(
        tmp_path / "run", *settings, "grpo.async_grpo.max_trajectory_age_steps=2", recipe="quickstart_async"
    )
    assert run.finish(timeout_s=1200) == 0, run.log()
    rows = run.metrics()
    assert max(row["trajectory_versions_max"] for row in rows) > 1
    assert all(row["gen_kl_error"] < 0.05 for row in rows)
    run.assert_nothing_left()


def test_training_replays_the_experts_that_the_engine_chose(tmp_path: Path) -> None:
    settings = (
        *COLOCATED,
        *REPLAY,
        "grpo.max_num_steps=3",
        *(f"policy.parallel.{axis}=1" for axis in ("data", "expert")),
    )
    run = TrainingRun(
        tmp_path / "run",
        *settings,
        "generation.parallel.tensor=1",
        "generation.parallel.expert=1",
        recipe="quickstart_moe",
    )
    assert run.finish(timeout_s=1200) == 0, run.log()
    for row in run.metrics():
        assert 0.9 < row["moe_routing_agreement"] <= 1
        assert row["token_mult_prob_error"] < 1.02
    run.assert_nothing_left()
