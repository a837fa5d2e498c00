"""Checkpoints, start-up and host memory of a run, by arithmetic that is written out here."""

import math

import pytest

from megatron_grpo.config.schema import Config, TeacherConfig
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.estimates import count_checkpoint_bytes, count_loaded_bytes, count_store_bytes
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.operation import (
    PROCESS_GIB,
    describe_checkpoints,
    describe_start,
    list_host_parts,
    plan_checkpoints,
    time_start,
)
from megatron_grpo.platform.hardware import load_hardware
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, small_run

H100 = load_hardware("h100")
STEP_S = 10.0


def count_parameters(shape: ModelShape) -> int:
    return sum(map(math.prod, measure_tensors(shape).values()))


def make_run(**parallel: int) -> Config:
    """A run in bfloat16 that saves every ten steps, on storage that takes one of its checkpoints in 20 seconds."""
    config = small_run(**parallel)
    config.policy.precision, config.cluster.gpus_per_node = "bfloat16", 8
    config.plan.storage_gb_per_s = count_checkpoint_bytes(config, DENSE) / 20 / 1e9
    return config


def test_a_checkpoint_has_weights_main_weights_and_moments() -> None:
    config = make_run(data=2)
    all_but_norms = pytest.approx(14 * count_parameters(DENSE), rel=0.02)
    assert count_checkpoint_bytes(config, DENSE) == all_but_norms
    config.policy.lora.rank = 4
    rows_and_columns = sum(
        sum(shape) for name, shape in measure_tensors(DENSE).items() if ".layers." in name and len(shape) == 2
    )
    assert count_checkpoint_bytes(config, DENSE) == 14 * 4 * rows_and_columns, "adapters of every matrix, alone"


@pytest.mark.parametrize(("background", "wait_s", "share"), [(False, 20.0, 20 / 120), (True, 0.0, 0.0)])
def test_saves_take_their_share_of_the_time(background: bool, wait_s: float, share: float) -> None:
    config = make_run()
    config.checkpointing.async_save, config.checkpointing.keep_top_k = background, 3
    plan = plan_checkpoints(config, DENSE, H100, STEP_S)
    assert plan is not None
    assert (plan.write_s, plan.period_s, plan.stored) == (pytest.approx(20.0), 100.0, 5)
    assert plan.wait_s == pytest.approx(wait_s, abs=1e-3)
    assert plan.share == pytest.approx(share, abs=1e-4)
    assert plan.stop_s == pytest.approx(50.0 if background else 30.0), "a save in the background may come before"
    text = "\n".join(describe_checkpoints(config, plan))
    assert "written in the background" in text if background else "saves take 16.7% of the time" in text
    assert "at most 5 at once" in text
    assert ("save_period=" in text) != background


def test_the_advised_period_leaves_the_time_to_steps() -> None:
    config = make_run()
    plan = plan_checkpoints(config, DENSE, H100, STEP_S)
    assert plan is not None
    (advice,) = [line for line in describe_checkpoints(config, plan) if "save_period=" in line]
    config.checkpointing.save_period = int(advice.partition("save_period=")[2].partition(",")[0])
    assert config.checkpointing.save_period == 38, "20 s of 400"
    longer = plan_checkpoints(config, DENSE, H100, STEP_S)
    assert longer is not None
    assert 0.0499 < longer.share <= 0.05
    config.checkpointing.enabled = False
    assert plan_checkpoints(config, DENSE, H100, STEP_S) is None


def test_a_save_that_outlasts_its_period_holds_the_run_even_in_the_background() -> None:
    config = make_run()
    config.checkpointing.async_save, config.checkpointing.save_period = True, 1
    plan = plan_checkpoints(config, DENSE, H100, STEP_S)
    assert plan is not None
    assert plan.wait_s == pytest.approx(20.0 - STEP_S, abs=1e-3)


def test_every_replica_reads_its_dense_matrices_at_a_start() -> None:
    config, parameters = make_run(data=2), count_parameters(DENSE)
    assert count_loaded_bytes(config, DENSE) == pytest.approx(2 * 2 * parameters, rel=0.02)
    shared = count_loaded_bytes(make_run(data=4), EXPERTS) - count_loaded_bytes(make_run(data=2), EXPERTS)
    assert 0 < shared < 2 * 2 * count_parameters(EXPERTS), "experts are read once"
    assert time_start(config, DENSE, resumes=True) > time_start(config, DENSE)
    assert "raise it" not in describe_start(config, DENSE)
    config.cluster.startup_timeout_s = 60.0
    assert describe_start(config, DENSE).endswith("cluster.startup_timeout_s=60 is the limit; raise it")


def test_hosts_also_have_processes_and_the_data_of_steps() -> None:
    config = make_run(data=2)
    assert list_host_parts(config, DENSE)["8 processes"] == 8 * PROCESS_GIB
    config.generation.placement = "colocated"
    assert list_host_parts(config, DENSE)["16 processes"] == 16 * PROCESS_GIB


def test_hidden_states_of_a_teacher_are_most_of_the_store() -> None:
    config = make_run()
    tokens = float(find_lengths(config).totals.mean()) * config.samples_per_step
    before = count_store_bytes(config, DENSE)
    config.algorithm, config.teacher = "distillation", TeacherConfig()
    assert count_store_bytes(config, DENSE) - before == pytest.approx(2 * tokens * 2 * DENSE.hidden)
    config.distillation.topk_logits_k = 8
    assert count_store_bytes(config, DENSE) - before == pytest.approx(2 * tokens * 4 * 17)
