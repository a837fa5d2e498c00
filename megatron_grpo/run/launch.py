"""Starts the Ray actors of a run in parallel: policy, value model, engines, rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import ConfigError, Problem, RunError, SamplingError
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import list_code_folders
from megatron_grpo.data.image_prompts import make_run_images
from megatron_grpo.environments.environment_processes import EnvironmentPool, build_environments
from megatron_grpo.environments.interface import make_environment_settings
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.teacher_client import TeacherServer, require_same_tokenizer
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.losses.decay import make_decay
from megatron_grpo.models.adapter_names import make_policy_slot
from megatron_grpo.models.families import exchange_head
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.heads import VALUE
from megatron_grpo.models.image_store import locate_images
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import fetch_model_folder, read_policy_shape
from megatron_grpo.models.tokenizer_files import explain_other_tokens
from megatron_grpo.rollouts.endpoint import make_endpoint_settings
from megatron_grpo.rollouts.engine_replacer import RestoreEngines, refuse_to_restore
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.trainer.messages import (
    PolicyDistillation,
    RankSettings,
    TeacherHead,
    TeacherOutput,
    make_training_filter,
)
from megatron_grpo.trainer.model_ranks import MegatronPolicy, MegatronTeacher, MegatronValue, ModelRanks


@dataclass(frozen=True, slots=True)
class Models:
    """Models and engines of a run that trains."""

    policy: MegatronPolicy
    value: MegatronValue | None
    generation: VllmGeneration | None  # None: the rollouts are read from a recording
    teachers: dict[str, MegatronTeacher | TeacherServer] = field(
        default_factory=dict
    )  # by section of the configuration

    @property
    def by_name(self) -> dict[str, ModelRanks]:
        """Models that have ranks, the policy first."""
        models = {"policy": self.policy, "value": self.value, **self.teachers}
        return {name: model for name, model in models.items() if isinstance(model, ModelRanks)}


def start_models(config: Config, folder: Path, cluster: RayCluster, stack: ExitStack) -> Models:
    """Begin to start models and engines; the stack ends them."""
    colocated = config.generation.is_colocated and config.needs_generation
    engines, value_model = config.generation.parallel, config.value_model
    generation: VllmGeneration | None = None
    if colocated:
        guests = [engine * engines.ranks_per_engine for engine in range(engines.data)]
        guests += range(value_model.parallel.world_size if value_model else 0)
        guests += [rank for teacher in config.teacher_models.values() for rank in range(teacher.parallel.world_size)]
        cluster.reserve_shared(config.policy.parallel.world_size, guests)
    else:
        has_own_engines = config.needs_generation and not config.generation.server.urls
        value_parallel = value_model.parallel if value_model else None
        teacher_layouts = [teacher.parallel for teacher in config.teacher_models.values()]
        cluster.reserve(config.policy.parallel, engines if has_own_engines else None, value_parallel, teacher_layouts)
        if config.needs_generation:
            generation = _start_generation(config, folder, cluster, stack, awaits_refit=True)
    settings, timeout_s = make_policy_settings(config, folder), config.cluster.startup_timeout_s
    policy = MegatronPolicy(settings, cluster.build_policy_options, timeout_s)
    stack.callback(policy.shutdown)
    if colocated:
        cluster.share(policy.list_devices(), engines.ranks_per_engine)
    value = _make_value_model(config, cluster) if value_model else None
    teachers = _make_teachers(config, folder, cluster)
    models = Models(policy, value, generation, teachers)
    for model in list(models.by_name.values())[1:]:
        stack.callback(model.shutdown)
    if colocated:
        # Engines measure the free memory of their devices, so they start first, and sleep before the models start.
        generation = _start_generation(config, folder, cluster, stack, awaits_refit=True)
        generation.wait_ready()
        generation.sleep()
    for model in models.by_name.values():
        model.start()
    return replace(models, generation=generation)


def restart_models(models: Models, cluster: RayCluster) -> None:
    """End all ranks, and begin to start new ones.

    Engines that share their devices sleep. RunError: the policy's ranks have come to other GPUs than its engines.
    """
    for model in models.by_name.values():
        model.replace_actors()
    if models.generation is not None and models.generation.config.is_colocated:
        cluster.require_shared(models.policy.list_devices())
    for model in models.by_name.values():
        model.start()


def start_engines(
    config: Config, folder: Path, cluster: RayCluster, stack: ExitStack, image_store: Path | None = None
) -> VllmGeneration:
    """Begin to start engines alone; the stack ends them.

    `image_store`: of the images of prompts; None: that of the run.
    """
    generation = replace(config.generation, placement="separate")  # there is no policy to share devices with
    cluster.reserve(None, generation.parallel, None)
    return _start_generation(replace(config, generation=generation), folder, cluster, stack, image_store=image_store)


def _start_generation(
    config: Config,
    folder: Path,
    cluster: RayCluster,
    stack: ExitStack,
    *,
    awaits_refit: bool = False,
    image_store: Path | None = None,
) -> VllmGeneration:
    has_slot = awaits_refit and config.refit.adapters == "alone"  # engines then read the base model themselves
    settings = VllmSettings(
        model_path=str(folder),
        config=config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        routed=RoutedForm.from_shape(read_model_shape(folder)) if config.policy.moe.replay_routing else None,
        in_flight=config.async_sampling if config.async_sampling.enabled else None,
        awaits_refit=awaits_refit and not has_slot,
        images=_make_engine_images(config, folder, image_store),
        adapter=make_policy_slot(config.policy, read_model_shape(folder)) if has_slot else None,
        has_prometheus=config.logger.prometheus,
    )
    options, timeout_s = cluster.build_engine_options, config.cluster.startup_timeout_s
    generation = VllmGeneration(settings, actor_options=options, startup_timeout_s=timeout_s)
    stack.callback(generation.shutdown)
    generation.start()
    return generation


def _make_engine_images(config: Config, folder: Path, store: Path | None) -> EngineImages | None:
    images = make_run_images(config, folder, store)
    if images is None:
        return None
    return EngineImages(str(images.store), images.vision, images.max_images, config.policy.train_vision_tower)


def make_policy_settings(config: Config, folder: Path) -> RankSettings:
    """Make the settings of the policy's ranks; `folder` has the model."""
    is_sampled = not config.method.rows  # rows have no temperature and no filter
    shape, distillation = read_policy_shape(config, folder), None
    if config.named_teachers:
        heads = read_teacher_heads(config)
        distillation = PolicyDistillation(
            vocab=count_shared_tokens(shape, heads.values()),
            kl_type=config.loss_fn.kl_type,
            mixed_kl_weight=config.loss_fn.mixed_kl_weight,
            heads=tuple(heads.values()) if config.distillation.topk_logits_k is None else (),
        )
    elif config.teaches_itself:
        output = TeacherOutput(vocab=shape.vocab, top_k=config.distillation.topk_logits_k)
        kind, weight = config.loss_fn.kl_type, config.loss_fn.mixed_kl_weight
        distillation = PolicyDistillation(vocab=shape.vocab, kl_type=kind, mixed_kl_weight=weight, self_output=output)
    return RankSettings(
        config=config.policy,
        shape=shape,
        distillation=distillation,
        folder=str(folder),
        reference=config.reference if config.uses_reference else None,
        temperature=config.generation.temperature if is_sampled else 1.0,
        token_filter=make_training_filter(config.generation) if is_sampled else None,
        decay_steps=config.decay_steps,
        decay=make_decay("policy", config.policy.optimizer, list_code_folders(config)),
        never_sampled=shape.vision.placeholders if shape.vision and config.data.image_key and is_sampled else (),
        images_folder=str(locate_images(config.run_dir)) if config.data.image_key else "",
        seed=config.loop.seed,
        ranks_per_machine=config.cluster.gpus or None,  # ranks on CPUs are all on one
        shares_cores=_uses_shared_cores(config),
    )


def _make_value_model(config: Config, cluster: RayCluster) -> MegatronValue:
    assert config.value_model is not None
    folder = fetch_model_folder(config.value_model.model.path, "value.model.path")
    settings = RankSettings(
        config=config.value_model,
        shape=exchange_head(read_model_shape(folder, reward_models=True), VALUE),
        folder=str(folder),
        decay_steps=config.value_decay_steps,
        decay=make_decay("value", config.value.optimizer, list_code_folders(config)),
        images_folder=str(locate_images(config.run_dir)) if config.data.image_key else "",
        seed=config.loop.seed,
        ranks_per_machine=config.cluster.gpus or None,  # ranks on CPUs are all on one
        shares_cores=_uses_shared_cores(config),
    )
    return MegatronValue(settings, cluster.build_value_options, config.cluster.startup_timeout_s)


def read_teacher_heads(config: Config) -> dict[str, TeacherHead]:
    """Read folder and sizes of each teacher that has ranks, by section."""
    folders = {
        section: fetch_model_folder(teacher.model.path, f"{section}.model.path")
        for section, teacher in config.teacher_models.items()
    }
    return {section: TeacherHead(str(folder), read_model_shape(folder)) for section, folder in folders.items()}


def count_shared_tokens(policy: ModelShape, teachers: Iterable[TeacherHead]) -> int:
    """Count the first tokens that a policy and its teachers share."""
    # Models with one tokenizer may differ in rows that no token has, which pad the vocabulary to a round number.
    return min([policy.vocab, *(teacher.shape.vocab for teacher in teachers)])


def _make_teachers(config: Config, folder: Path, cluster: RayCluster) -> dict[str, MegatronTeacher | TeacherServer]:
    """Make the teachers, by section.

    ConfigError: a folder has another tokenizer. RunError: a server has another one, or does not answer.
    """
    if not config.named_teachers:
        return {}
    teachers: dict[str, MegatronTeacher | TeacherServer] = {}
    heads, top_k = read_teacher_heads(config), config.distillation.topk_logits_k
    output = TeacherOutput(vocab=count_shared_tokens(read_model_shape(folder), heads.values()), top_k=top_k)
    models = config.teacher_models
    for section, head in heads.items():  # those of the hub are known only now
        reason = explain_other_tokens(folder, Path(head.folder))
        if reason is not None:
            raise ConfigError([Problem(f"{section}.model.path={models[section].model.path}", reason)])
    for section, teacher in config.named_teachers.items():
        if teacher.server_url is not None:
            assert top_k is not None, "a server gives likeliest tokens"
            server = TeacherServer(
                f"{section}.server_url",
                teacher.server_url,
                top_k,
                config.policy.timeout_s,
                policy_folder=str(folder),
                api_key_variable=teacher.api_key_variable,
            )
            require_same_tokenizer(server)
            teachers[section] = server
            continue
        settings = RankSettings(
            config=models[section],
            shape=heads[section].shape,
            folder=heads[section].folder,
            decay_steps=1,  # it is never trained
            teacher=output,
            temperature=config.generation.temperature,
            seed=config.loop.seed,
            ranks_per_machine=config.cluster.gpus or None,  # ranks on CPUs are all on one
            shares_cores=_uses_shared_cores(config),
        )
        options = partial(cluster.build_teacher_options, list(models).index(section))
        label = section.replace("teachers.", "teacher of ")
        teachers[section] = MegatronTeacher(settings, options, config.cluster.startup_timeout_s, label)
    return teachers


def _uses_shared_cores(config: Config) -> bool:
    """True if engines of the run sample on its cores while its models train."""
    has_own_devices = not config.generation.is_colocated and not config.generation.server.urls
    return config.async_sampling.can_sample_ahead and has_own_devices


def start_rollouts(
    config: Config,
    folder: Path,
    generation: VllmGeneration | None,
    stack: ExitStack,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    tokenizer: Any = None,
    image_store: Path | None = None,
    restore: RestoreEngines = refuse_to_restore,
) -> RolloutPool:
    """Begin to start rollout workers and environments; the stack ends them.

    `folder` has the model; `generation`: the engines, which are being started, or None: workers only read a recording.
    A script gives `rewards`, by their names in reward_funcs, and `tokenizer`, which replaces that of the folder.
    `image_store`: of the images of prompts and turns; None: that of the run.
    """
    environments: dict[str, EnvironmentPool] = {}
    tokenizer = str(folder) if tokenizer is None else tokenizer
    if generation is not None:
        images = make_run_images(config, folder, image_store)
        settings = partial(make_environment_settings, config, tokenizer=tokenizer, images=images)
        environments = build_environments(config.env, settings, rewards)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    rollouts = RolloutPool(
        config.rollouts,
        generation.engines if generation else {},
        environments,
        generation_timeout_s=config.generation.timeout_s,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        max_turns=config.loop.max_rollout_turns,
        routed=generation.routed if generation else None,
        endpoint=make_endpoint_settings(config.generation.endpoint, tokenizer) if generation else None,
        restore=restore,
    )
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return rollouts


def restore_from_folder(generation: VllmGeneration, lost_engines: Mapping[int, str]) -> None:
    """Replace lost engines by new ones with the folder's weights."""
    try:
        generation.replace(lost_engines)
    except RunError as error:
        raise SamplingError(str(error)) from error
