"""The processes of a run beside its driver: all are started before any is waited for, so that they come up together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.schema import Config
from megatron_grpo.environments.pool import build_environments
from megatron_grpo.environments.settings import environment_settings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.policy.driver.value import MegatronValue
from megatron_grpo.refit.interface import WeightTransport
from megatron_grpo.refit.select import transport_between
from megatron_grpo.rollouts.endpoint import endpoint_settings
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.opening import Opening
from megatron_grpo.run.start_models import routed_form, start_models
from megatron_grpo.run.startup_parts import StartupParts


@dataclass(frozen=True, slots=True)
class Processes:
    """What trains, samples and scores, and the links between."""

    policy: MegatronPolicy
    value: MegatronValue | None
    """None: the algorithm has no value model."""
    generation: VllmGeneration
    transport: WeightTransport
    rollouts: RolloutPool

    def wait_ready(self, parts: StartupParts) -> None:
        """Return when all are up and the links for the weights are made; how long that took is added to the parts.

        Raises:
            RunError: something did not come up; says what and why.
        """
        with parts.part("waiting"):
            for part in (self.policy, self.value, self.generation, self.rollouts):
                if part is not None:
                    part.wait_ready()
        for kind, model in (("policy", self.policy), ("value", self.value), ("engine", self.generation)):
            if model is not None:
                parts.add_slowest(kind, model.startup_s)
        with parts.part("refit"):
            self.transport.connect()


def start_processes(config: Config, folder: Path, opening: Opening, stack: ExitStack) -> Processes:
    """Begin to start everything.

    Args:
        config: the run's configuration.
        folder: the model to start from, in Hugging Face format.
        opening: the run's beginning: its folder, its Ray, and what a script gave.
        stack: ends the processes.
    """
    policy, value, generation = start_models(config, folder, opening.cluster, stack)
    environments = build_environments(config.env, environment_settings(config, folder), opening.given.rewards)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    transport = transport_between(policy, generation, config.refit, opening.run_dir)
    stack.callback(transport.close)
    rollouts = RolloutPool(
        config.rollouts,
        generation.engines,
        environments,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        max_turns=config.loop.max_rollout_turns,
        generation_timeout_s=config.generation.timeout_s,
        routed=routed_form(config, folder),
        endpoint=endpoint_settings(config.generation.endpoint, folder),
        restore=transport.restore,
    )
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return Processes(policy, value, generation, transport, rollouts)
