"""Refits and moves to the host as NeMo RL does them, for the rows of plan_rows.yaml with `moves: nemo_rl`.

They are not as ours, so a plan of ours does not tell their seconds. Published of them:

- Every rank of the policy gathers every weight, over pipeline stages, experts and tensor-parallel ranks; engines on
  other GPUs then get them by a broadcast (https://github.com/NVIDIA-NeMo/RL/discussions/3315), which overlaps with the
  gathering (pull request 1379).
- The optimizer's state goes tensor by tensor to pageable memory, at 1.8 GB/s on an H100; a plain copy from or to such
  memory reached 16.1 GB/s there (issue 3976). Their pull request 2248 has pinned memory as an option, off by default.

Assumed: that weights are gathered over stages first, then over experts or tensor-parallel ranks; that other hosts copy
as fast. Speeds of links are those of every plan. Nothing here was adjusted to a row.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.costs import time_collective
from megatron_grpo.planning.engine_shards import split_engine
from megatron_grpo.planning.generation_cost import _count_weight_bytes, count_expert_parameters, size_engine
from megatron_grpo.planning.step import StepTimes
from megatron_grpo.platform.hardware import Hardware

TO_HOST, FROM_HOST = 1.8e9, 16.1e9
"""Bytes of the optimizer's state a second, to pageable memory of new tensors, and from there."""
STATE_BYTES = 12
"""Of the optimizer's state for a parameter: a weight and two moments in float32."""


def count_bytes(shape: ModelShape) -> tuple[int, int]:
    """Count bytes of the weights in bfloat16: of experts, and of all others."""
    (engine_section,) = split_engine(GenerationParallelConfig(), shape)
    everything, experts = _count_weight_bytes(shape, engine_section, 2, 2), 0
    if shape.experts is not None:
        layers = sum(map(shape.has_experts, range(shape.layers)))
        experts = 2 * layers * shape.experts.count * count_expert_parameters(shape)
    return experts, everything - experts


def time_gathered_refit(config: Config, shape: ModelShape, gpu: Hardware) -> float:
    """Seconds until every rank of the policy, and of engines on other GPUs, has had every weight."""
    parallel, generation = config.policy.parallel, config.generation
    experts, other_bytes = count_bytes(shape)
    stage_ranks = parallel.world_size // parallel.pipeline
    stages = tuple(range(0, parallel.world_size, stage_ranks))
    # A stage sends what a rank of it holds to the same rank of each other stage: no link carries less than all of that.
    gathered = time_collective(gpu, "ring", experts // parallel.expert + other_bytes // parallel.tensor, stages)
    gathered += time_collective(gpu, "allgather", experts, tuple(range(parallel.expert)))
    gathered += time_collective(gpu, "allgather", other_bytes, tuple(range(parallel.tensor)))
    if generation.is_colocated:
        return gathered
    engines = generation.parallel.data * generation.parallel.ranks_per_engine
    everyone = tuple(range(parallel.world_size + engines))
    return max(gathered, time_collective(gpu, "broadcast", experts + other_bytes, everyone))


def slow_moves(times: StepTimes, config: Config, shape: ModelShape, gpu: Hardware) -> StepTimes:
    """Move the optimizer's state at the speeds of pageable memory, in place of pinned memory's.

    Engines keep their weights on the host while they sleep.
    """
    if not config.generation.is_colocated:
        return times
    state = STATE_BYTES * sum(count_bytes(shape)) / 2 / config.policy.parallel.world_size
    engine, phase_s = size_engine(config, shape, gpu).weight_bytes, dict(times.phase_s)
    for phase, speed in (("offload", TO_HOST), ("onload", FROM_HOST)):
        phase_s[phase] += state / speed - (state - engine) / gpu.host_bytes_per_s
    return replace(times, phase_s=phase_s, synchronous_s=sum(phase_s.values()))
