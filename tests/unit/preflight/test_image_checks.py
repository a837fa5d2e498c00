"""What cannot take prompts with images yet is refused before the start, each by its key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight.image_checks import find_image_problems, refuse_images
from megatron_grpo.preflight.load import compose_config

SHAPE = parse_model_shape(PREPARED_MODELS["counting"])
TEXT = parse_model_shape(PREPARED_MODELS["addition"])


def collect_problems(*overrides: str) -> dict[str, str]:
    """What is said of images in the recipe, changed in its values."""
    try:
        compose_config(["+exp=quickstart_vision", *overrides])
    except ConfigError as error:
        return {problem.key: problem.text for problem in error.problems if "image" in problem.text}
    return {}


def test_the_recipe_has_no_problem() -> None:
    assert collect_problems() == {}
    assert collect_problems("algorithm=async_grpo") == {}
    assert list(find_image_problems(compose_config(["+exp=quickstart"]), TEXT)) == []


@pytest.mark.parametrize(
    "override",
    [
        "data.long_prompts=cut_left",
        "data.apply_chat_template=False",
        "data.processor=package.module.function",
        "policy.fp8.format=hybrid",
        "policy.logprob_kernel=fused",
        "generation.server.urls=[http://127.0.0.1:8000]",
        "generation.parallel.pipeline=2",
        "generation.engine.speculative.num_speculative_tokens=3",
        "env.counting.type=judge",
        "env.counting.type=openenv",
        "env.counting.type=verifiers",
        "generation.top_p=0.9",
        "generation.top_k=5",
        "generation.min_p=0.1",
    ],
)
def test_each_is_refused_by_its_key(override: str) -> None:
    assert list(collect_problems(override)) == [override.partition("=")[0]]


def test_what_a_trained_tower_needs() -> None:
    train = "policy.train_vision_tower=true"
    config = compose_config(["+exp=quickstart_vision", train])
    assert list(find_image_problems(config, SHAPE)) == []
    assert SHAPE.vision is not None
    seeing = replace(SHAPE, layers=4, vision=replace(SHAPE.vision, levels=3))
    config.policy.parallel.pipeline = 2
    (problem,) = find_image_problems(config, seeing)
    assert problem.subject == "policy.train_vision_tower=true"
    assert "in the first 3 layers, which have to be on the tower's pipeline rank" in problem.text
    config.policy.parallel.first_stage_layers = 3
    assert list(find_image_problems(config, seeing)) == []
    config.policy.lora.rank = 4
    assert [problem.subject for problem in find_image_problems(config, seeing)] == ["policy.train_vision_tower=true"]
    config.policy.lora.rank = 0
    config.policy.optimizer.name = "muon"
    assert [problem.subject for problem in find_image_problems(config, seeing)] == ["policy.train_vision_tower=true"]
    config = compose_config(["+exp=quickstart"])
    config.policy.train_vision_tower = True
    assert "needs prompts with images" in next(iter(find_image_problems(config, TEXT))).text


@pytest.mark.parametrize("algorithm", ["kto", "reward_model", "chord", "distillation", "self_distillation"])
def test_other_algorithms_are_refused(algorithm: str) -> None:
    assert "use grpo, ppo, sft, dpo" in collect_problems(f"algorithm={algorithm}")["algorithm"]


@pytest.mark.parametrize("algorithm", ["ppo", "sft", "dpo"])
def test_algorithms_that_take_images(algorithm: str) -> None:
    assert collect_problems(f"algorithm={algorithm}") == {}


def test_adapters_are_merged_for_engines() -> None:
    assert collect_problems("policy.lora.rank=4") == {}
    assert list(collect_problems("policy.lora.rank=4", "refit.adapters=alone")) == ["refit.adapters"]


def test_a_value_model_takes_images_as_the_policy_does(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart_vision", "algorithm=ppo"])
    config.value.model.path = str(tmp_path)
    for raw, is_refused in ((PREPARED_MODELS["counting"], False), (PREPARED_MODELS["addition"], True)):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        keys = [problem.key for problem in find_image_problems(config, SHAPE)]
        assert keys == ["value.model.path"] * is_refused
    (tmp_path / "config.json").write_text(json.dumps({**PREPARED_MODELS["counting"], "image_token_id": 43}))
    assert [problem.key for problem in find_image_problems(config, SHAPE)] == ["value.model.path"]
    config.policy.train_vision_tower = True
    assert config.value_model is not None
    assert not config.value_model.train_vision_tower


def test_a_model_that_does_not_see_is_refused() -> None:
    config = compose_config(["+exp=quickstart_vision"])
    (problem,) = find_image_problems(config, TEXT)
    assert problem.key == "policy.model.path"
    _, _, architectures = problem.text.partition("those that do: ")
    assert {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"} <= {*architectures.split(", ")}


def test_recorded_rollouts_of_such_a_model_are_no_rows() -> None:
    config = compose_config(["+exp=quickstart"])
    recorded = replace(config, data=replace(config.data, from_rollouts="run"))
    assert [problem.key for problem in find_image_problems(recorded, SHAPE)] == ["data.from_rollouts"]
    assert list(find_image_problems(recorded, TEXT)) == []


def test_commands_that_compute_no_images_say_so() -> None:
    with pytest.raises(ConfigError, match="the doctor does not compute prompts with images"):
        refuse_images(compose_config(["+exp=quickstart_vision"]), "the doctor")
    refuse_images(compose_config(["+exp=quickstart"]), "the doctor")
