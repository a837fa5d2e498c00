"""Starts the Ray actors of a run in parallel: policy, value model, engines, rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.environment_processes import EnvironmentPool, build_environments
from megatron_grpo.environments.interface import make_environment_settings
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.adapter_names import make_policy_slot
from megatron_grpo.models.families import as_value_model, read_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.source import fetch_model_folder
from megatron_grpo.rollouts.endpoint import make_endpoint_settings
from megatron_grpo.rollouts.engine_replacer import RestoreEngines, refuse_to_restore
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.trainer.messages import RankSettings, make_training_filter
from megatron_grpo.trainer.model_ranks import MegatronPolicy, MegatronValue


@dataclass(frozen=True, slots=True)
class Models:
    """Models and engines of a run that trains."""

    policy: MegatronPolicy
    value: MegatronValue | None
    generation: VllmGeneration | None  # None: the rollouts are read from a recording


def start_models(config: Config, folder: Path, cluster: RayCluster, stack: ExitStack) -> Models:
    """Begin to start models and engines; the stack ends them."""
    colocated = config.generation.is_colocated and config.needs_generation
    engines, value_model = config.generation.parallel, config.value_model
    generation: VllmGeneration | None = None
    if colocated:
        guests = [engine * engines.ranks_per_engine for engine in range(engines.data)]
        guests += range(value_model.parallel.world_size if value_model else 0)
        cluster.reserve_shared(config.policy.parallel.world_size, guests)
    else:
        has_own_engines = config.needs_generation and not config.generation.server.urls
        value_parallel = value_model.parallel if value_model else None
        cluster.reserve(config.policy.parallel, engines if has_own_engines else None, value_parallel)
        if config.needs_generation:
            generation = _start_generation(config, folder, cluster, stack, awaits_refit=True)
    settings, timeout_s = make_policy_settings(config, folder), config.cluster.startup_timeout_s
    policy = MegatronPolicy(settings, cluster.build_policy_options, timeout_s)
    stack.callback(policy.shutdown)
    if colocated:
        cluster.share(policy.list_devices(), engines.ranks_per_engine)
    value = _make_value_model(config, cluster) if value_model else None
    if value is not None:
        stack.callback(value.shutdown)
    if colocated:
        # Engines measure the free memory of their devices, so they start first, and sleep before the models start.
        generation = _start_generation(config, folder, cluster, stack, awaits_refit=True)
        generation.wait_ready()
        generation.sleep()
    policy.start()
    if value is not None:
        value.start()
    return Models(policy, value, generation)


def start_engines(config: Config, folder: Path, cluster: RayCluster, stack: ExitStack) -> VllmGeneration:
    """Begin to start engines alone; the stack ends them."""
    generation = replace(config.generation, placement="separate")  # there is no policy to share devices with
    cluster.reserve(None, generation.parallel, None)
    return _start_generation(replace(config, generation=generation), folder, cluster, stack)


def _start_generation(
    config: Config, folder: Path, cluster: RayCluster, stack: ExitStack, *, awaits_refit: bool = False
) -> VllmGeneration:
    has_slot = awaits_refit and config.refit.adapters == "alone"  # engines then read the base model themselves
    settings = VllmSettings(
        model_path=str(folder),
        config=config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        routed=RoutedForm.from_shape(read_model_shape(folder)) if config.policy.moe.replay_routing else None,
        in_flight=config.training_loop.async_grpo if config.training_loop.async_grpo.enabled else None,
        awaits_refit=awaits_refit and not has_slot,
        adapter=make_policy_slot(config.policy, read_model_shape(folder)) if has_slot else None,
    )
    options, timeout_s = cluster.build_engine_options, config.cluster.startup_timeout_s
    generation = VllmGeneration(settings, actor_options=options, startup_timeout_s=timeout_s)
    stack.callback(generation.shutdown)
    generation.start()
    return generation


def make_policy_settings(config: Config, folder: Path) -> RankSettings:
    """Make the settings of the policy's ranks; `folder` has the model."""
    is_sampled = not config.training_loop.is_supervised  # rows have no temperature and no filter
    return RankSettings(
        config=config.policy,
        shape=read_model_shape(folder),
        folder=str(folder),
        reference=config.reference if config.uses_reference else None,
        temperature=config.generation.temperature if is_sampled else 1.0,
        token_filter=make_training_filter(config.generation) if is_sampled else None,
        decay_steps=config.decay_steps,
        seed=config.training_loop.seed,
        ranks_per_machine=config.cluster.gpus or None,  # ranks on CPUs are all on one
        shares_cores=_uses_shared_cores(config),
    )


def _make_value_model(config: Config, cluster: RayCluster) -> MegatronValue:
    assert config.value_model is not None
    folder = fetch_model_folder(config.value_model.model.path, "value.model.path")
    settings = RankSettings(
        config=config.value_model,
        shape=as_value_model(read_model_shape(folder, reward_models=True)),
        folder=str(folder),
        decay_steps=config.value_decay_steps,
        seed=config.training_loop.seed,
        ranks_per_machine=config.cluster.gpus or None,  # ranks on CPUs are all on one
        shares_cores=_uses_shared_cores(config),
    )
    return MegatronValue(settings, cluster.build_value_options, config.cluster.startup_timeout_s)


def _uses_shared_cores(config: Config) -> bool:
    """True if engines of the run sample on its cores while its models train."""
    has_own_devices = not config.generation.is_colocated and not config.generation.server.urls
    return config.training_loop.async_grpo.can_sample_ahead and has_own_devices


def start_rollouts(
    config: Config,
    folder: Path,
    generation: VllmGeneration | None,
    stack: ExitStack,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    tokenizer: Any = None,
    restore: RestoreEngines = refuse_to_restore,
) -> RolloutPool:
    """Begin to start rollout workers and environments; the stack ends them.

    `folder` has the model; `generation`: the engines, which are being started, or None: workers only read a recording.
    A script gives `rewards`, by their names in reward_funcs, and `tokenizer`, which replaces that of the folder.
    """
    environments: dict[str, EnvironmentPool] = {}
    tokenizer = str(folder) if tokenizer is None else tokenizer
    if generation is not None:
        settings = partial(make_environment_settings, config, tokenizer=tokenizer)
        environments = build_environments(config.env, settings, rewards)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    rollouts = RolloutPool(
        config.rollouts,
        generation.engines if generation else [],
        environments,
        generation_timeout_s=config.generation.timeout_s,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        max_turns=config.training_loop.max_rollout_turns,
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
