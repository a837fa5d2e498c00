"""Starting the actors of a run in parallel: policy, value model, engines, rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.environments.interface import environment_settings
from megatron_grpo.environments.pool import build_environments
from megatron_grpo.sampler.endpoint import endpoint_settings
from megatron_grpo.sampler.engine_group import VllmGeneration
from megatron_grpo.sampler.pool import RolloutPool
from megatron_grpo.sampler.worker_group import Restore, WorkerGroup, not_replaced
from megatron_grpo.trainer.actor import RankSettings
from megatron_grpo.trainer.group import MegatronPolicy, MegatronValue
from megatron_grpo.weights.families import as_value_model, shape_of_folder
from megatron_grpo.weights.refit.broadcast import BroadcastTransport
from megatron_grpo.weights.refit.files import FilesTransport
from megatron_grpo.weights.refit.reshard import ReshardTransport
from megatron_grpo.weights.refit.transport import WeightTransport
from megatron_grpo.weights.source import model_folder


@dataclass(frozen=True, slots=True)
class Models:
    """Models and engines of a run that trains."""

    policy: MegatronPolicy
    value: MegatronValue | None
    """Of PPO."""
    generation: VllmGeneration | None
    """None: the rollouts are read from a recording."""


def start_models(config: Config, folder: Path, cluster: RayCluster, stack: ExitStack) -> Models:
    """Begin to start the policy, the value model of PPO and the engines on Ray. The stack ends them."""
    if config.generation.colocated and config.generates:
        return _start_in_turn(config, folder, cluster, stack)
    value_model = config.value_model
    own_engines = config.generates and not config.generation.server.urls
    value_parallel = value_model.parallel if value_model else None
    cluster.reserve(config.policy.parallel, config.generation.parallel if own_engines else None, value_parallel)
    generation = _generation(config, folder, cluster) if config.generates else None
    if generation is not None:
        stack.callback(generation.shutdown)
        generation.start()
    policy = _policy(config, folder, cluster)
    stack.callback(policy.shutdown)
    policy.start()
    value = _value(config, cluster) if value_model else None
    if value is not None:
        stack.callback(value.shutdown)
        value.start()
    return Models(policy, value, generation)


def start_engines(config: Config, folder: Path, cluster: RayCluster, stack: ExitStack) -> VllmGeneration:
    """Begin to start the engines alone on Ray, with the weights of the model folder. The stack ends them."""
    alone = replace(config.generation, placement="separate")  # there is no policy to share devices with
    cluster.reserve(None, alone.parallel)
    generation = _generation(replace(config, generation=alone), folder, cluster)
    stack.callback(generation.shutdown)
    generation.start()
    return generation


def _start_in_turn(config: Config, folder: Path, cluster: RayCluster, stack: ExitStack) -> Models:
    """As `start_models`, on shared devices: engines measure the free memory, so they start first, and sleep before the
    models start."""
    ranks = config.policy.parallel.world_size
    value_ranks = config.value_model.parallel.world_size if config.value_model else 0
    cluster.reserve_shared(ranks, config.generation.parallel.data + value_ranks)
    policy = _policy(config, folder, cluster)
    stack.callback(policy.shutdown)
    cluster.share(policy.devices(), config.generation.parallel.ranks_per_engine)
    value = _value(config, cluster) if config.value_model else None
    if value is not None:
        stack.callback(value.shutdown)
    generation = _generation(config, folder, cluster)
    stack.callback(generation.shutdown)
    generation.start()
    generation.wait_ready()
    generation.sleep()
    policy.start()
    if value is not None:
        value.start()
    return Models(policy, value, generation)


def _generation(config: Config, folder: Path, cluster: RayCluster) -> VllmGeneration:
    return VllmGeneration(
        str(folder),
        config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        actor_options=cluster.engine_options,
        startup_timeout_s=config.cluster.startup_timeout_s,
        routed=RoutedForm.of(shape_of_folder(folder)) if config.policy.moe.replay_routing else None,
        in_flight=config.loop.async_grpo if config.loop.async_grpo.enabled else None,
    )


def _policy(config: Config, folder: Path, cluster: RayCluster) -> MegatronPolicy:
    settings = RankSettings(
        config=config.policy,
        shape=shape_of_folder(folder),
        folder=str(folder),
        reference=config.reference if config.uses_reference else None,
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        seed=config.loop.seed,
        shares_cores=_shares_cores(config),
    )
    return MegatronPolicy(settings, cluster.policy_options, config.cluster.startup_timeout_s)


def _value(config: Config, cluster: RayCluster) -> MegatronValue:
    assert config.value_model is not None
    folder = model_folder(config.value_model.model.path, "value.model.path")
    settings = RankSettings(
        config=config.value_model,
        shape=as_value_model(shape_of_folder(folder, reward_models=True)),
        folder=str(folder),
        decay_steps=config.value_decay_steps,
        seed=config.loop.seed,
        shares_cores=_shares_cores(config),
    )
    return MegatronValue(settings, cluster.value_options, config.cluster.startup_timeout_s)


def _shares_cores(config: Config) -> bool:
    """Whether engines of the run sample while it trains."""
    return config.loop.async_grpo.samples_ahead and not config.generation.server.urls


def start_rollouts(
    config: Config,
    folder: Path,
    generation: VllmGeneration,
    stack: ExitStack,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    restore: Restore = not_replaced,
) -> RolloutPool:
    """Begin to start rollout workers over engines, and the environments. The stack ends them.

    Args:
        config: the configuration of a run, or of an evaluation.
        folder: the model's folder in Hugging Face format.
        generation: the engines, which are being started.
        stack: ends what is started here.
        rewards: a script's reward functions, by their entry in reward_funcs.
        restore: replaces engines that are lost.
    """
    environments = build_environments(config.env, environment_settings(config, folder), rewards)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    workers = WorkerGroup(
        config.rollouts.num_workers,
        generation.engines,
        environments,
        generation_timeout_s=config.generation.timeout_s,
        routed=generation.routed,
        endpoint=endpoint_settings(config.generation.endpoint, folder),
    )
    rollouts = RolloutPool(
        config.rollouts,
        workers,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        max_turns=config.loop.max_rollout_turns,
        restore=restore,
    )
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return rollouts


def start_recording_workers(config: Config, stack: ExitStack) -> RolloutPool:
    """Begin to start rollout workers without engines, which read a recording instead of sampling."""
    workers = WorkerGroup(config.rollouts.num_workers, [], {}, generation_timeout_s=config.generation.timeout_s)
    longest = config.policy.max_total_sequence_length
    rollouts = RolloutPool(config.rollouts, workers, max_total_sequence_length=longest)
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return rollouts


def restore_from_folder(generation: VllmGeneration) -> Restore:
    """What replaces lost engines whose weights are those of the model folder."""

    def restore(lost: Mapping[int, str]) -> None:
        try:
            generation.replace(lost)
        except RunError as error:
            raise SamplingError(str(error)) from error

    return restore


def make_transport(
    policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig, run_dir: Path
) -> WeightTransport:
    """The transport of the policy's weights to the engines, not yet connected.

    Args:
        policy: the model whose weights are sent.
        generation: the engines that receive them.
        config: the transport and its settings.
        run_dir: the run's folder, which distinguishes its files from those of other runs.
    """
    if config.mode == "files":
        return FilesTransport(policy, generation, config, run_dir)
    transports = {"broadcast": BroadcastTransport, "reshard": ReshardTransport}
    return transports[config.mode](policy, generation, config)
