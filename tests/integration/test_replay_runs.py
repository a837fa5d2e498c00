"""Whole runs that replay routing: in turn, ahead, resumed, PPO, and turns of an agent on a server elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.prepare.models import prepare
from tests.integration.runs import TrainingRun, without_timing
from tests.integration.server_process import serving
from tests.integration.whole_runs import complete

pytestmark = pytest.mark.slow

STEPS = 4
REPLAY = (
    "policy.moe.replay_routing=true",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2",
)
OF_ASYNC = ("trajectory_", "buffer_", "exposed_generation_s")


def short(name: str) -> list[str]:
    """Of the section of an algorithm."""
    sizes = {"max_num_steps": STEPS, "num_prompts_per_step": 16, "val_period": 0, "val_at_start": "false"}
    return [f"{name}.{key}={value}" for key, value in (sizes | {"val_at_end": "false"}).items()]


def moe_run(run_dir: Path, *overrides: str, section: str = "grpo") -> TrainingRun:
    return complete(TrainingRun(run_dir, *short(section), *REPLAY, *overrides, recipe="quickstart_moe"), 400)


def assert_replayed(rows: list[dict[str, Any]]) -> None:
    """In float32 the routers of training would choose almost all of these experts, under the weights of the draw."""
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0.9 < row["moe_routing_agreement"] <= 1 for row in rows)
    assert any(row["moe_routing_agreement"] > 0.999 for row in rows)


KEPT = ("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5")
SAVED = ("checkpointing.save_period=2", "checkpointing.keep_top_k=null")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run whose checkpoint of step 2 holds groups that step 3 learns from, with their experts."""
    return moe_run(tmp_path_factory.mktemp("in_turn") / "run", *KEPT, *SAVED)


def test_training_computes_as_the_engine_has_drawn(in_turn: TrainingRun) -> None:
    assert_replayed(in_turn.metrics())
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in in_turn.metrics())


def test_a_checkpoint_keeps_the_experts_of_groups_that_wait(in_turn: TrainingRun, tmp_path: Path) -> None:
    resumed = moe_run(tmp_path / "run", *KEPT, *SAVED, f"checkpointing.resume={in_turn.run_dir}/checkpoints/step_2")
    assert without_timing(resumed.metrics()) == without_timing(in_turn.metrics()[2:])


def test_ahead_without_age_the_numbers_are_those_of_sampling_in_turn(in_turn: TrainingRun, tmp_path: Path) -> None:
    ahead = "grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0"
    rows = [
        {name: value for name, value in row.items() if not name.startswith(OF_ASYNC)}
        for row in without_timing(moe_run(tmp_path / "run", *KEPT, *ahead).metrics())
    ]
    assert rows == without_timing(in_turn.metrics())


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_responses_go_on_under_new_weights(recompute: str, tmp_path: Path) -> None:
    cache = f"grpo.async_grpo.recompute_kv_cache_after_weight_updates={recompute}"
    rows = moe_run(tmp_path / "run", "grpo.async_grpo.enabled=true", cache).metrics()
    assert_replayed(rows)
    assert max(row["trajectory_age_max"] for row in rows) == 1
    assert all(row["gen_kl_error"] < 0.01 for row in rows)


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_ppo_replays_the_policy_and_not_the_value_model(ahead: str, tmp_path: Path) -> None:
    settings = ["algorithm=ppo", f"ppo.async_grpo.enabled={ahead}"]
    rows = moe_run(tmp_path / "run", *settings, section="ppo").metrics()
    assert_replayed(rows)
    assert all(row["value_grad_norm"] > 0 for row in rows)


def test_an_agents_turns_on_a_server_are_replayed(tmp_path: Path) -> None:
    prepare("addition_moe", str(tmp_path / "prepared"))
    with serving(tmp_path / "prepared" / "model", tmp_path / "server.log", "--enable-return-routed-experts") as server:
        run = moe_run(
            tmp_path / "run",
            f"prepare.folder={tmp_path / 'prepared'}",
            f"generation.server.urls=[{server.url}]",
            "generation.parallel.tensor=1",
            "generation.parallel.expert=1",
            "generation.endpoint.enabled=true",
            "refit.mode=files",
            f"refit.directory={tmp_path / 'shared'}",
            "env.addition.type=reward_functions",
            "env.addition.reward_funcs=[tests.integration.example_agent.longer]",
            "env.addition.agent_func=tests.integration.example_agent.twice",
            "grpo.num_prompts_per_step=4",
            "checkpointing.enabled=false",
        )
    assert_replayed(run.metrics())
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in run.metrics())
    assert any(len(sample["spans"]) == 2 for sample in run.rollouts(1)), "two turns"
