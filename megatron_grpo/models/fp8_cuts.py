"""Matrices that a refit can send in FP8 blocks, and layouts that cut them inside a block."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice
from megatron_grpo_kernels.fp8_format import BLOCK

# Dimensions of router and value head, whose tensors are not converted to FP8.
_EXCLUDED_DIMS = {"experts", "score"}


def can_travel_in_fp8(entry: WeightEntry) -> bool:
    """True for matrices of layers; not for embeddings, heads, routers, norms, biases."""
    are_matrices = all(len(tensor.dims) == 2 and not _EXCLUDED_DIMS & set(tensor.dims) for tensor in entry.hf)
    return entry.half is not None and are_matrices


def find_cut_blocks(shape: ModelShape, policy: ParallelConfig, engine: GenerationParallelConfig) -> Iterator[str]:
    """Describe each matrix that a rank cuts inside a block."""
    # An FP8 block has one scale, computed from its largest number. Ranks that hold parts of one block would compute
    # different scales, and an engine's layer has room for one; a common scale would take a collective for each matrix
    # of a refit. So the ranks of neither side may cut a matrix inside a block.
    # What engines really keep is traced later, and the writer refuses parts of blocks (`model_writer`).
    engine_experts = 1 if engine.expert > 1 else engine.tensor
    parts = {"policy": (policy.tensor, policy.expert_tensor), "engine": (engine.tensor, engine_experts)}
    for entry in filter(can_travel_in_fp8, build_weight_map(shape)):
        for side, counts in parts.items():
            count = counts[entry.per_expert]
            # Then vLLM keeps copies of the heads of keys and values, and the policy cuts them.
            if side == "engine" and entry.split == "groups" and count > shape.key_value_heads:
                continue
            for rank in range(count):
                for part in entry.list_slices(shape, 0, rank, count):
                    if _has_cut_block(part):
                        yield f"{part.name} on {side} ranks: {_describe_cut(part)}"


def _has_cut_block(part: WeightSlice) -> bool:
    bounds = zip(part.bounds, part.shape, strict=True)
    return any(begin % BLOCK or (end % BLOCK and end != size) for (begin, end), size in bounds)


def _describe_cut(part: WeightSlice) -> str:
    cuts = [bounds for bounds, size in zip(part.bounds, part.shape, strict=True) if bounds != (0, size)]
    return f"{' and '.join(f'{begin} to {end}' for begin, end in cuts)} of {part.shape}"
