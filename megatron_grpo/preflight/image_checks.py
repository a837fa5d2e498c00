"""Checks of prompts with images: what cannot take them yet is refused by its key."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.generation_schema import FILTERS
from megatron_grpo.config.schema import Config
from megatron_grpo.data.specs import ROW_FORMS, find_processor_name
from megatron_grpo.models.families import list_families
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_value_shape
from megatron_grpo.models.weight_layouts import assign_layers
from megatron_grpo.preflight.rules import Rule, evaluate_rules

_WITH_IMAGES = "prompts with images (data.image_key)"


@evaluate_rules
def find_image_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings beside data.image_key; shape None: unknown."""
    text = "may have images in its prompts, which are not read from recorded rollouts yet; use data.train_path"
    yield shape is not None and shape.vision and config.data.from_rollouts is not None, "data.from_rollouts=", text
    yield from _check_tower(config, shape)
    if config.data.image_key is None:
        return
    able = ", ".join(method.name for method in ALGORITHMS.values() if method.takes_images)
    text = f"has no {_WITH_IMAGES} yet; use {able}"
    yield not config.method.takes_images, "algorithm=", text
    yield from check_sampled_images(config, shape)
    yield from _check_value_model(config, shape)
    yield from _check_training(config)


def check_sampled_images(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check rows with images and their sampling; shape None: unknown."""
    if config.data.image_key is None:
        return
    visions = [family.vision for family in list_families() if family.vision is not None]
    names = ", ".join(vision.architecture for vision in visions if vision.images is not None)
    text = f"is a model that takes no {_WITH_IMAGES}; those that do: {names}"
    yield shape is not None and shape.vision is None, "policy.model.path=", text
    yield from _check_rows(config)
    yield from _check_sampling(config)


def _check_tower(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    policy, subject = config.policy, "policy.train_vision_tower=true"
    if not policy.train_vision_tower:
        return
    yield config.data.image_key is None, subject, f"needs {_WITH_IMAGES}, from which the tower gets its gradients"
    yield policy.lora.rank > 0, subject, "has no adapters, which would be trained alone; use policy.lora.rank=0"
    yield policy.optimizer.name == "muon", subject, "is trained by adamw alone; use policy.optimizer.name=adamw"
    if shape is None or shape.vision is None:
        return
    levels = shape.vision.levels
    text = f"takes features of images in the first {levels} layers, which have to be on the tower's pipeline rank;"
    text += " use another policy.parallel.first_stage_layers, or false"
    first_layers = assign_layers(policy.parallel, shape.layers)[0]
    yield not set(range(levels)) <= set(first_layers), subject, text


def _check_value_model(config: Config, policy: ModelShape | None) -> Iterator[Rule]:
    if config.value_model is None or config.value.model.path is None or policy is None:
        return
    shapes = [policy, find_value_shape(config)]
    forms = [shape and shape.vision and (shape.vision.placeholders, shape.vision.merge) for shape in shapes]
    text = "takes no images in the form of the policy's; give a model of its kind, or null"
    yield shapes[1] is not None and forms[0] != forms[1], "value.model.path=", text


def refuse_images(config: Config, command: str) -> None:
    """ConfigError: a command would compute prompts with images, which it cannot yet."""
    if config.data.image_key is not None:
        text = f"{command} does not compute {_WITH_IMAGES} yet"
        raise ConfigError([Problem(f"data.image_key={config.data.image_key}", text)])


def _check_rows(config: Config) -> Iterator[Rule]:
    data = config.data
    text = f"would cut through images; {_WITH_IMAGES} need filter or error"
    yield data.long_prompts == "cut_left", "data.long_prompts=", text
    text = f"has no {_WITH_IMAGES} yet; use false"
    yield data.streaming, "data.streaming=", text
    text = f"leaves out the chat template, which says where images stand; {_WITH_IMAGES} need true"
    for task in config.env:
        prompts = data.tasks.get(task)
        of_task = None if prompts is None else prompts.apply_chat_template
        key = f"data.tasks.{task}.apply_chat_template=" if of_task is not None else "data.apply_chat_template="
        yield not (data.apply_chat_template if of_task is None else of_task), key, text
        name = find_processor_name(data, task)
        text_of_processor = f"makes prompts by itself, and {_WITH_IMAGES} are made by the model's processor; use null"
        key = "data.processor=" if prompts is None or prompts.processor is None else f"data.tasks.{task}.processor="
        yield name is not None and name not in ROW_FORMS, key, text_of_processor


def _check_training(config: Config) -> Iterator[Rule]:
    policy = config.policy
    text = f"has no {_WITH_IMAGES} yet; use"
    yield policy.lora.rank and config.refit.adapters == "alone", "refit.adapters=", f"{text} merged"
    yield policy.fp8.format != "off", "policy.fp8.format=", f"{text} off"
    yield policy.quantization is not None, "policy.quantization=", f"{text} null"
    fused = "computes placeholders of images, which are never sampled; use auto or chunked"
    yield policy.logprob_kernel == "fused", "policy.logprob_kernel=", fused
    yield config.debug.rollouts_from is not None, "debug.rollouts_from=", f"{text} null"


def _check_sampling(config: Config) -> Iterator[Rule]:
    generation = config.generation
    text = f"has no {_WITH_IMAGES} yet; use"
    yield generation.server.urls, "generation.server.urls=", f"{text} []"
    for name in generation.select_changed(FILTERS):
        yield True, f"generation.{name}=", f"is a filter, which {text} the default"
    tokens = generation.engine.speculative.num_speculative_tokens
    yield tokens, "generation.engine.speculative.num_speculative_tokens=", f"{text} 0"
    yield generation.parallel.pipeline > 1, "generation.parallel.pipeline=", f"{text} 1"
    for name, environment in config.env.items():
        unseeing = "sees no images, and its scores would be of the text alone; use reward functions"
        yield environment.reward_model_folders, f"env.{name}.reward_funcs=", f"names a reward model, which {unseeing}"
        yield environment.type == "judge", f"env.{name}.type=", unseeing
        has_server = environment.type in ("openenv", "verifiers")
        yield has_server, f"env.{name}.type=", f"{text} another environment, or an agent of your own"
