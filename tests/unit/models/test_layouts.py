"""What ranks have, against Megatron-Core's and vLLM's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.planning.engine_shards import split_engine
from tests.support.hf_configs import QWEN3_MOE

LAYOUTS = {
    "even": ParallelConfig(pipeline=4),
    "interleaved": ParallelConfig(pipeline=2, virtual_pipeline=3),
    "first": ParallelConfig(pipeline=3, first_stage_layers=2),
    "both": ParallelConfig(pipeline=4, first_stage_layers=3, last_stage_layers=1),
    "both_interleaved": ParallelConfig(pipeline=4, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=2),
    "counted": ParallelConfig(pipeline=2, count_embedding=True, count_loss=True),
    "counted_interleaved": ParallelConfig(pipeline=2, virtual_pipeline=7, count_embedding=True, count_loss=True),
}
LAYERS = 12


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_are_those_that_megatron_gives_a_stage(name: str) -> None:
    parallel = LAYOUTS[name]
    shape = parse_model_shape({**QWEN3_MOE, "num_hidden_layers": LAYERS})
    places = split_policy(parallel, shape)
    expected = [megatron_layers(parallel, stage) for stage in range(parallel.pipeline)]
    assert [place.layers for place in places] == expected
    assert [shard.has_embedding for shard in places] == [True] + [False] * (len(places) - 1)
    assert [shard.has_output for shard in places] == [False] * (len(places) - 1) + [True]


def megatron_layers(parallel: ParallelConfig, stage: int) -> tuple[int, ...]:
    """Numbers of a stage's layers, chunk by chunk, from Megatron-Core's two functions."""
    from megatron.core.models.gpt.gpt_layer_specs import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    chunks = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    config: Any = SimpleNamespace(
        num_layers=LAYERS,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        account_for_embedding_in_pipeline_split=parallel.count_embedding,
        account_for_loss_in_pipeline_split=parallel.count_loss,
    )
    numbers: list[int] = []
    for chunk in range(chunks or 1):
        which = chunk if chunks else None
        begin = get_transformer_layer_offset(config, vp_stage=which, pp_rank=stage)
        numbers += range(begin, begin + get_num_layers_to_build(config, vp_stage=which, pp_rank=stage))
    return tuple(numbers)


@pytest.mark.parametrize(("layers", "stages"), [(8, 2), (7, 2), (10, 4), (11, 4), (61, 4), (5, 5), (94, 3)])
def test_layers_are_those_that_vllm_gives_a_stage(layers: int, stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    shape = parse_model_shape({**QWEN3_MOE, "num_hidden_layers": layers})
    places = split_engine(GenerationParallelConfig(pipeline=stages, tensor=2), shape)
    expected = [tuple(range(*get_pp_indices(layers, stage, stages))) for stage in range(stages)]
    assert [place.layers for place in places[::2]] == expected
    assert [place.tensor.index for place in places] == [0, 1] * stages


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (7, 2), (10, 4), (128, 8), (3, 3)])
def test_experts_are_those_that_vllm_gives_a_rank(experts: int, ranks: int) -> None:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    shape = parse_model_shape({**QWEN3_MOE, "num_experts": experts})
    for place in split_engine(GenerationParallelConfig(tensor=ranks, expert=ranks), shape):
        count, numbers, _ = determine_expert_map(ranks, place.tensor.index, experts)
        assert numbers is not None
        mine = [expert for expert, number in enumerate(numbers.tolist()) if number >= 0]
        assert mine == list(range(*place.experts))
        assert count == len(mine)
        assert place.expert_tensor.count == 1, "each has whole experts"
