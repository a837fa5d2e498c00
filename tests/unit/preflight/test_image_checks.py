"""What cannot take prompts with images yet is refused before the start, each by its key."""

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
    config = compose_config(["+exp=quickstart_vision", *overrides])
    return {problem.key: problem.text for problem in find_image_problems(config, SHAPE)}


def test_the_recipe_has_no_problem() -> None:
    assert collect_problems() == {}
    config = compose_config(["+exp=quickstart"])
    assert list(find_image_problems(config, TEXT)) == []


@pytest.mark.parametrize(
    "override",
    [
        "data.long_prompts=cut_left",
        "data.apply_chat_template=False",
        "data.processor=package.module.function",
        "grpo.async_grpo.enabled=True",
        "policy.lora.rank=4",
        "policy.fp8.format=hybrid",
        "policy.logprob_kernel=fused",
        "generation.server.urls=[http://127.0.0.1:8000]",
        "generation.endpoint.enabled=True",
        "generation.parallel.pipeline=2",
        "generation.engine.speculative.num_speculative_tokens=3",
        "env.counting.type=judge",
        "env.counting.type=openenv",
    ],
)
def test_each_is_refused_by_its_key(override: str) -> None:
    key = override.partition("=")[0]
    problems = collect_problems(override)
    assert [problem.partition("=")[0] for problem in problems] == [key]
    assert "image" in problems[next(iter(problems))]


@pytest.mark.parametrize("override", ["generation.top_p=0.9", "generation.top_k=5", "generation.min_p=0.1"])
def test_filters_that_training_repeats_are_refused(override: str) -> None:
    assert list(collect_problems(override)) == ["generation"]


@pytest.mark.parametrize("algorithm", ["ppo", "sft", "dpo", "kto", "distillation", "self_distillation"])
def test_other_algorithms_are_refused(algorithm: str) -> None:
    assert f"algorithm={algorithm}" in collect_problems(f"algorithm={algorithm}")


def test_a_model_that_does_not_see_is_refused() -> None:
    config = compose_config(["+exp=quickstart_vision"])
    (problem,) = find_image_problems(config, TEXT)
    assert problem.key.startswith("policy.model.path=")
    assert problem.text.endswith("those that do: Qwen2_5_VLForConditionalGeneration")


def test_recorded_rollouts_of_such_a_model_are_no_rows() -> None:
    config = compose_config(["+exp=quickstart_sft", "data.train_path=null", f"data.from_rollouts={Path.cwd()}"])
    assert [problem.key.partition("=")[0] for problem in find_image_problems(config, SHAPE)] == ["data.from_rollouts"]


def test_commands_that_compute_no_images_say_so() -> None:
    with pytest.raises(ConfigError, match="the doctor does not compute prompts with images"):
        refuse_images(compose_config(["+exp=quickstart_vision"]), "the doctor")
    refuse_images(compose_config(["+exp=quickstart"]), "the doctor")
