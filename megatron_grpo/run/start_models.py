"""Starting everything that holds weights; it comes up side by side."""

from __future__ import annotations

from contextlib import ExitStack
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


def start_models(
    config: Config, folder: Path, cluster: RayCluster, stack: ExitStack
) -> tuple[MegatronPolicy, MegatronValue | None, VllmGeneration]:
    """Begin to start the policy, the value model of PPO and the engines on Ray. The stack ends them."""
    value_model = config.value_model
    cluster.reserve(config.policy.parallel, config.generation.parallel, value_model.parallel if value_model else None)
    generation = _start_generation(config, folder, cluster)
    stack.callback(generation.shutdown)
    policy = _start_policy(config, folder, cluster)
    stack.callback(policy.shutdown)
    value = _start_value(config, cluster) if value_model else None
    if value is not None:
        stack.callback(value.shutdown)
    return policy, value, generation


def routed_form(config: Config, folder: Path) -> RoutedForm | None:
    """What the experts look like that engines return with the policy's responses; None: they return none."""
    return RoutedForm.of(shape_of_folder(folder)) if config.policy.moe.replay_routing else None


def _start_generation(config: Config, folder: Path, cluster: RayCluster) -> VllmGeneration:
    generation = VllmGeneration(
        str(folder),
        config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        actor_options=cluster.engine_options,
        startup_timeout_s=config.cluster.startup_timeout_s,
        routed=routed_form(config, folder),
        in_flight=config.loop.async_grpo if config.loop.async_grpo.enabled else None,
    )
    generation.start()
    return generation


def _start_policy(config: Config, folder: Path, cluster: RayCluster) -> MegatronPolicy:
    settings = PolicySettings(
        config=config.policy,
        shape=shape_of_folder(folder),
        folder=str(folder),
        reference=config.reference if config.uses_reference else None,
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        seed=config.loop.seed,
    )
    policy = MegatronPolicy(settings, cluster.policy_options, config.cluster.startup_timeout_s)
    policy.start()
    return policy


def _start_value(config: Config, cluster: RayCluster) -> MegatronValue:
    assert config.value_model is not None
    folder = model_folder(config.value_model.model.path, "value.model.path")
    settings = ValueSettings(
        config=config.value_model,
        shape=as_value_model(shape_of_folder(folder, reward_models=True)),
        folder=str(folder),
        decay_steps=config.value_decay_steps,
        seed=config.loop.seed,
    )
    value = MegatronValue(settings, cluster.value_options, config.cluster.startup_timeout_s)
    value.start()
    return value
