"""Everything that answers prompts: engines of one model and the environments that score, without a policy to train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_grpo.cluster.guardian import guarded
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.cluster.signals import terminated_like_interrupted
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.registry import check_environments
from megatron_grpo.environments.reward_check import check_reward_functions
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.reward_columns import columns_known
from megatron_grpo.run.start_rollouts import start_rollouts


def check_scoring(config: Config, sets: Sequence[DatasetConfig]) -> None:
    """Look at the environments before processes are started that would fail over them.

    Raises:
        ConfigError: one cannot be made, or a reward function not be called with the columns of the sets.
    """
    check_environments(config)
    check_reward_functions(config.env, columns_known(config, sets))


@contextmanager
def answering(config: Config, model: Path, output: Path) -> Iterator[RolloutPool]:
    """Rollout workers over engines of a model; on leaving, however that is, every process is ended.

    Args:
        config: cluster, generation, environments and rollouts.
        model: folder in Hugging Face format.
        output: folder whose logs/ the processes write to.

    Raises:
        RunError: something did not come up; the message says what.
    """
    with ExitStack() as stack:
        stack.enter_context(terminated_like_interrupted())
        stack.enter_context(driver_log(output, config.logger.level))
        if config.cluster.ray_address is None:
            stack.enter_context(guarded())
        cluster = RayCluster(config.cluster)
        stack.callback(cluster.shutdown)
        cluster.start()
        generation = _engines(config, model, cluster)
        stack.callback(generation.shutdown)
        generation.start()
        rollouts = start_rollouts(config, model, generation, stack)
        generation.wait_ready()
        rollouts.wait_ready()
        yield rollouts


def _engines(config: Config, model: Path, cluster: RayCluster) -> VllmGeneration:
    """Engines that no policy shares devices with, which are not started yet."""
    alone = replace(config.generation, placement="separate")
    cluster.reserve(None, alone.parallel)
    return VllmGeneration(
        str(model),
        alone,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        actor_options=cluster.engine_options,
        startup_timeout_s=config.cluster.startup_timeout_s,
    )
