"""Starting everything that holds weights; it comes up side by side."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.schema import Config
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families import shape_of_folder
from megatron_grpo.models.routed import RoutedForm
from megatron_grpo.models.source import model_folder
from megatron_grpo.models.value_head import as_value_model
from megatron_grpo.policy.driver.policy import MegatronPolicy, PolicySettings
from megatron_grpo.policy.driver.value import MegatronValue, ValueSettings


@dataclass(frozen=True, slots=True)
class Models:
    """Everything that holds weights in a run that trains."""

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
    """As `start_models`, on devices that all share: engines measure how much memory there is, so they come first and
    sleep when the models begin to start."""
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
    settings = PolicySettings(
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
    settings = ValueSettings(
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
