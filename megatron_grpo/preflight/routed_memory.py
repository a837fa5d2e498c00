"""Host memory of the experts that replayed routing records."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from megatron_grpo.config.schema import Config
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.rules import Rule, evaluate_rules


def count_token_bytes(config: Config, shape: ModelShape | None) -> int:
    """Count bytes of a token's recorded experts; 0: nothing is recorded."""
    is_recorded = config.policy.moe.replay_routing and config.needs_generation and config.debug.train
    if not is_recorded or shape is None or shape.experts is None:
        return 0
    return RoutedForm.from_shape(shape).token_bytes


def count_routed_bytes(config: Config, shape: ModelShape | None, tokens_per_sample: float) -> float:
    """Count bytes of recorded experts in host memory, over all nodes.

    They are those of a step that trains. `tokens_per_sample`: of prompt and response together.
    """
    asynchronous, parallel = config.async_sampling, config.policy.parallel
    samples = config.loop.num_generations_per_prompt
    # A step's rollouts, and those of the steps that are sampled ahead.
    batches = 1 + (asynchronous.max_trajectory_age_steps if asynchronous.enabled else 0)
    rollouts = batches * config.prompts_per_generation_batch * samples
    # The step's sequences once more as partitions, and on ranks: those of a pipeline stage have their own layers, and
    # the others of a replica have all of its tokens.
    copies = (1 + parallel.tensor * parallel.context) * config.samples_per_step
    return float(count_token_bytes(config, shape) * tokens_per_sample * (rollouts + copies))


@evaluate_rules
def find_routed_remarks(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that recorded experts fit the machine of a run on one."""
    needed = count_routed_bytes(config, shape, config.policy.max_total_sequence_length)
    memory = psutil.virtual_memory().total
    text = (
        f"keeps up to {needed / 2**30:.0f} GiB of recorded experts in host memory ({count_token_bytes(config, shape)} "
        f"bytes a token, if all are of policy.max_total_sequence_length), and this machine has {memory / 2**30:.0f} GiB"
        "; lower the age of samples, prompts of a step, or the length"
    )
    yield config.cluster.num_nodes == 1 and needed > memory, "policy.moe.replay_routing=", text
