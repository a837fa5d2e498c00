"""Shards: the layers, the parts of matrices and the experts that each rank of the policy holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_grpo.models.megatron_names import TOWER
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry

if TYPE_CHECKING:
    from megatron_grpo.config.policy_schema import ParallelConfig


@dataclass(frozen=True, slots=True)
class Split:
    """Part `index` of `count` equal parts."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class RankShard:
    """The part of a model that one rank holds."""

    layers: tuple[int, ...]  # numbers from 0
    has_embedding: bool
    has_output: bool  # the final norm and the head
    tensor: Split = Split()  # the rank's part of every matrix that tensor parallelism splits
    experts: tuple[int, int] = (0, 1)
    """Range [begin, end) of the rank's experts in every layer; (0, 1) in a model without experts."""
    expert_tensor: Split = Split()  # the rank's part of every matrix of an expert

    def keeps(self, entry: WeightEntry, layer: int = 0) -> bool:
        """Whether the rank has a row's parameter (of this layer)."""
        if entry.half is not None:
            return layer in self.layers
        return self.has_embedding if entry.name.startswith(("embedding.", TOWER)) else self.has_output

    def find_split(self, entry: WeightEntry) -> Split:
        """Find the rank's part of a row's matrices, if they are split."""
        return self.expert_tensor if entry.per_expert else self.tensor


def split_policy(parallel: ParallelConfig, shape: ModelShape) -> list[RankShard]:
    """Split the model over the policy's ranks, in Megatron-Core's order."""
    count = shape.experts.count if shape.experts is not None else 1
    per_rank = count // parallel.expert
    shards = []
    for stage, layers in enumerate(assign_layers(parallel, shape.layers)):
        for rank in range(parallel.world_size // parallel.pipeline):
            expert_rank = rank // parallel.expert_tensor % parallel.expert
            shards.append(
                RankShard(
                    layers=layers,
                    has_embedding=stage == 0,
                    has_output=stage == parallel.pipeline - 1,
                    tensor=Split(rank % parallel.tensor, parallel.tensor),
                    experts=(expert_rank * per_rank, (expert_rank + 1) * per_rank),
                    expert_tensor=Split(rank % parallel.expert_tensor, parallel.expert_tensor),
                )
            )
    return shards


def assign_layers(parallel: ParallelConfig, count: int) -> list[tuple[int, ...]]:
    """Assign layers to pipeline ranks, by chunks in turn when interleaved."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    configured = {0: parallel.first_stage_layers, stages - 1: parallel.last_stage_layers}
    fixed = {stage: layers for stage, layers in configured.items() if layers is not None}
    # The embedding and the loss may each count as one layer of their chunk.
    counted = {0: parallel.count_embedding, stages * chunks - 1: parallel.count_loss}
    even = (count + sum(counted.values()) - sum(fixed.values())) // max(stages - len(fixed), 1)
    layers: list[list[int]] = [[] for _ in range(stages)]
    begin = 0
    for chunk in range(stages * chunks):
        stage = chunk % stages
        size = fixed.get(stage, even) // chunks - counted.get(chunk, False)
        layers[stage] += range(begin, begin + size)
        begin += size
    assert begin == count, f"{begin} of {count} layers are assigned"
    return [tuple(numbers) for numbers in layers]


def list_engine_stages(layers: int, stages: int) -> list[range]:
    """List the layers of each pipeline stage of an engine, as vLLM divides them."""
    # vLLM gives the remainder to the stages before the last, from the back (vllm.distributed.utils).
    sizes = [layers // stages] * stages
    for stage in range(layers % stages):
        sizes[-2 - stage] += 1
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]
