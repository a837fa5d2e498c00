"""Which keys a run of PPO may set, which it may not, and what follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.preflight.load import compose_config

PPO = "+exp=quickstart_ppo"


def problems_of(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    return {problem.subject: problem.text for problem in caught.value.problems}


def test_the_value_model_is_as_the_policy_where_nothing_else_is_said() -> None:
    value = compose_config([PPO, "value.parallel.tensor=2"]).value_model
    assert value is not None
    assert value.model.path.endswith("model")
    assert (value.precision, value.microbatch_tokens, value.parallel.tensor) == ("float32", 1024, 2)
    assert compose_config(["+exp=quickstart"]).value_model is None


def test_a_value_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(vocab_size=16, max_position_embeddings=8, num_attention_heads=4, num_key_value_heads=2)
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.num_labels = 1
    config.save_pretrained(tmp_path)
    found = problems_of(PPO, f"value.model.path={tmp_path}")
    assert "has 8 positions, fewer than policy.max_total_sequence_length" in found[f"value.model.path={tmp_path}"]


def test_schedules_count_the_optimizer_steps_that_there_are() -> None:
    """400 steps of 2 epochs over 256 samples: the value model in 4 minibatches, the policy whole and 10 steps late."""
    config = compose_config(
        [PPO, "ppo.ppo_epochs=2", "ppo.policy_training_start_step=10", "value.train_global_batch_samples=64"]
    )
    assert config.decay_steps == 390 * 2
    assert config.value_decay_steps == 400 * 2 * 4


def test_reward_models_are_read_only_where_they_are_asked_for(tmp_path: Path) -> None:
    for labels in (1, 3):
        folder = tmp_path / str(labels)
        Qwen3Config(architectures=["Qwen3ForSequenceClassification"], num_labels=labels).save_pretrained(folder)
    assert read_model_shape(tmp_path / "1", reward_models=True).value_head == "stored"
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification is not supported"):
        read_model_shape(tmp_path / "1")
    with pytest.raises(ValueError, match="with 3 labels is a classifier"):
        read_model_shape(tmp_path / "3", reward_models=True)


@pytest.mark.parametrize(
    ("recipe", "overrides", "loaded"),
    [
        (PPO, ["ppo.skip_reference_policy_logprobs_calculation=false"], True),
        (PPO, ["ppo.skip_reference_policy_logprobs_calculation=true"], False),
        ("+exp=quickstart", [], False),
        ("+exp=quickstart", ["loss_fn.reference_policy_kl_penalty=0.1"], True),
    ],
)
def test_only_ppo_loads_a_reference_without_a_penalty(recipe: str, overrides: list[str], loaded: bool) -> None:
    assert compose_config([recipe, *overrides]).uses_reference == loaded


def test_the_kl_may_lower_the_reward_with_ppo() -> None:
    """What keeps GRPO from it, the standard deviation of a group, PPO does not have."""
    kl = ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"]
    config = compose_config([PPO, *kl, "ppo.skip_reference_policy_logprobs_calculation=false"])
    assert config.loss_fn.kl_in_reward == 0.1
    assert config.loss_fn.kl_in_loss == 0
