"""What a rank has of a model: which layers, which part of every matrix, which experts. Ranks of training and of
generation alike, so that what goes from one to the other is the intersection of two places."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.parallel_schema import ParallelConfig
from megatron_grpo.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Part:
    """One of several equal parts."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank has of a model."""

    layers: tuple[int, ...]
    """Numbers of its layers, from 0."""
    embedding: bool
    """Whether it has the embedding of tokens."""
    end: bool
    """Whether it has the last norm and the head."""
    tensor: Part = Part()
    """Its part of every matrix that is split."""
    experts: tuple[int, int] = (0, 1)
    """Its experts in every layer: the first, and one behind the last; (0, 1) of a model without experts."""
    expert_tensor: Part = Part()
    """Its part of every matrix of an expert."""


def training_places(parallel: ParallelConfig, shape: ModelShape) -> list[Place]:
    """The place of every rank that trains, in Megatron-Core's order of ranks: tp-cp-dp-pp, and tp-ep-dp of experts."""
    count = shape.experts.count if shape.experts is not None else 1
    per_rank = count // parallel.expert
    places = []
    for stage, layers in enumerate(_training_layers(parallel, shape.layers)):
        for rank in range(parallel.world_size // parallel.pipeline):
            sharing = rank // parallel.expert_tensor % parallel.expert
            places.append(
                Place(
                    layers=layers,
                    embedding=stage == 0,
                    end=stage == parallel.pipeline - 1,
                    tensor=Part(rank % parallel.tensor, parallel.tensor),
                    experts=(sharing * per_rank, (sharing + 1) * per_rank),
                    expert_tensor=Part(rank % parallel.expert_tensor, parallel.expert_tensor),
                )
            )
    return places


def _training_layers(parallel: ParallelConfig, count: int) -> list[tuple[int, ...]]:
    """By pipeline rank, the numbers of its layers: chunk by chunk, ranks in turn (interleaved pipeline)."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    given = {0: parallel.first_stage_layers, stages - 1: parallel.last_stage_layers}
    ends = {stage: layers for stage, layers in given.items() if layers is not None}
    counted = {0: parallel.count_embedding, stages * chunks - 1: parallel.count_loss}
    middle = count + sum(counted.values()) - sum(ends.values())
    even = middle // max(stages - len(ends), 1)
    layers: list[list[int]] = [[] for _ in range(stages)]
    begin = 0
    for chunk in range(stages * chunks):
        stage = chunk % stages
        size = ends.get(stage, even) // chunks - counted.get(chunk, False)
        layers[stage] += range(begin, begin + size)
        begin += size
    assert begin == count, f"{begin} of {count} layers have a place"
    return [tuple(numbers) for numbers in layers]


def engine_places(parallel: GenerationParallelConfig, shape: ModelShape) -> list[Place]:
    """The place of every rank of one vLLM engine, in vLLM's order of ranks: tensor-parallel neighbours side by side."""
    stages, tensor = parallel.pipeline, parallel.tensor
    # What does not share out evenly goes to the stages before the last, from behind (vllm.distributed.utils).
    sizes = [shape.layers // stages] * stages
    for stage in range(shape.layers % stages):
        sizes[-2 - stage] += 1
    count = shape.experts.count if shape.experts is not None else 1
    places = []
    for stage in range(stages):
        begin = sum(sizes[:stage])
        for rank in range(tensor):
            shared = parallel.expert > 1
            places.append(
                Place(
                    layers=tuple(range(begin, begin + sizes[stage])),
                    # A tied head is the embedding: the last stage has it too.
                    embedding=stage == 0 or (shape.tied_embeddings and stage == stages - 1),
                    end=stage == stages - 1,
                    tensor=Part(rank, tensor),
                    experts=_share(count, Part(rank, tensor)) if shared else (0, count),
                    expert_tensor=Part() if shared else Part(rank, tensor),
                )
            )
    return places


def _share(count: int, part: Part) -> tuple[int, int]:
    """Consecutive experts of a rank; the first ranks have one more where they do not share out evenly."""
    each, more = divmod(count, part.count)
    begin = part.index * each + min(part.index, more)
    return begin, begin + each + (part.index < more)
