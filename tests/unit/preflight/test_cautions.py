"""Settings that a run may have and that are remarked on before it starts."""

from __future__ import annotations

import pytest

from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.remarks import find_cautions, find_remarks

QUICKSTART, PPO = "+exp=quickstart", "+exp=quickstart_ppo"
STOP = ("grpo.early_stop.enabled=true",)


def said(*overrides: str) -> dict[str, str]:
    return {problem.subject: problem.text for problem in find_cautions(compose_config(list(overrides)))}


@pytest.mark.parametrize("recipe", [QUICKSTART, PPO, "+exp=qwen3_8b_8gpu", "+exp=llama3_70b_slurm"])
def test_nothing_is_said_of_the_recipes(recipe: str) -> None:
    assert list(find_remarks(compose_config([recipe]))) == []


def test_unused_settings_are_remarked_on() -> None:
    (remark,) = find_remarks(compose_config([QUICKSTART, "grpo.early_stop.threshold=0.9"]))
    assert (remark.subject, remark.text) == (
        "grpo.early_stop.threshold=0.9",
        "changes nothing in this run: needs grpo.early_stop.enabled=true",
    )


def test_greedy_sampling() -> None:
    assert "greedy" in said(QUICKSTART, "generation.temperature=0")["generation.temperature=0"]


def test_checkpoints_that_no_validation_ranks() -> None:
    subject = "checkpointing.save_period=15"
    given = (QUICKSTART, subject)
    assert "every grpo.val_period=10" in said(*given, "grpo.val_period=10")[subject]
    assert said(*given, "grpo.val_period=5") == {}
    assert said(*given, "grpo.val_period=10", "checkpointing.metric_name=reward") == {}


def test_reward_ranks_checkpoints_where_nothing_is_validated() -> None:
    off = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
    subject = "checkpointing.metric_name=val_accuracy"
    assert said(QUICKSTART, *off) == {subject: "is of a validation, and this run has none; reward ranks checkpoints"}
    assert said(QUICKSTART, *off, "checkpointing.metric_name=null") == {}
    config = compose_config([QUICKSTART, *off, "checkpointing.higher_is_better=false"])
    assert (config.ranked_checkpointing.metric_name, config.ranked_checkpointing.higher_is_better) == ("reward", True)


def test_reinforce_on_several_optimizer_steps() -> None:
    assert said(QUICKSTART, "+variant=rloo") == {}
    found = said(QUICKSTART, "+variant=rloo", "grpo.num_iterations=2")
    assert "2 optimizer steps" in found["loss_fn.disable_ppo_ratio=True"]


@pytest.mark.parametrize(
    ("overrides", "subject", "steps"),
    [
        ([QUICKSTART, "grpo.max_num_steps=10"], "policy.optimizer.warmup_steps=10", 10),
        ([QUICKSTART, "grpo.max_num_steps=2", "grpo.num_iterations=5"], "policy.optimizer.warmup_steps=10", 10),
        ([PPO, "ppo.max_num_steps=20"], "policy.optimizer.warmup_steps=10", 10),
        ([PPO, "value.optimizer.warmup_steps=400"], "value.optimizer.warmup_steps=400", 400),
    ],
)
def test_a_warm_up_that_does_not_end(overrides: list[str], subject: str, steps: int) -> None:
    """PPO's policy waits for 10 of its steps."""
    ((found, text),) = said(*overrides).items()
    assert found == subject
    assert f"makes {steps} optimizer steps, and none has" in text


def test_a_warm_up_that_just_ends() -> None:
    assert said(QUICKSTART, "grpo.max_num_steps=11") == {}
    assert said(QUICKSTART, "grpo.max_num_steps=3", "grpo.num_iterations=4") == {}


@pytest.mark.parametrize(
    ("threshold", "more", "text"),
    [
        ("1.01", [], "cannot be reached: val_accuracy is at most 1"),
        ("1.0", [], None),
        ("0", [], "is reached by any model: val_accuracy is never below 0"),
        ("1.5", ["grpo.early_stop.metric_name=val_reward"], "cannot be reached: val_reward is at most 1"),
        ("6", ["grpo.early_stop.metric_name=val_response_length"], "at most 5"),
        ("-0.1", ["grpo.early_stop.higher_is_better=false"], "cannot be reached: val_accuracy is at least 0"),
        ("1", ["grpo.early_stop.higher_is_better=false"], "is reached by any model: val_accuracy is never above 1"),
        (
            "7",
            [
                "grpo.early_stop.metric_name=val_reward",
                "env.addition.type=reward_functions",
                "env.addition.reward_funcs=[a.b]",
            ],
            None,
        ),
    ],
)
def test_a_threshold_that_decides_nothing(threshold: str, more: list[str], text: str | None) -> None:
    found = said(QUICKSTART, *STOP, f"grpo.early_stop.threshold={threshold}", *more)
    assert len(found) == (text is not None)
    assert all(text is not None and text in one for one in found.values())


def test_rollouts_of_several_turns_may_be_longer_than_one_turn() -> None:
    """One turn has 5 tokens at most, an agent's rollout any number."""
    subject = "grpo.early_stop.threshold=9"
    stop = (QUICKSTART, *STOP, "grpo.early_stop.metric_name=val_response_length", subject)
    assert any(key.startswith("grpo.early_stop.threshold") for key in said(*stop))
    for several in ("grpo.max_rollout_turns=3", "generation.endpoint.enabled=true"):
        assert not any(key.startswith("grpo.early_stop.threshold") for key in said(*stop, several))
