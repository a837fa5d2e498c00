"""What ranks have, against arithmetic of Megatron-Core and vLLM; the form of routed experts."""

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
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
    shards = split_policy(parallel, shape)
    expected = [megatron_layers(parallel, stage) for stage in range(parallel.pipeline)]
    assert [shard.layers for shard in shards] == expected
    assert [shard.has_embedding for shard in shards] == [True] + [False] * (len(shards) - 1)
    assert [shard.has_output for shard in shards] == [False] * (len(shards) - 1) + [True]


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
        chunk_index = chunk if chunks else None
        begin = get_transformer_layer_offset(config, vp_stage=chunk_index, pp_rank=stage)
        numbers += range(begin, begin + get_num_layers_to_build(config, vp_stage=chunk_index, pp_rank=stage))
    return tuple(numbers)


@pytest.mark.parametrize(("layers", "stages"), [(8, 2), (7, 2), (10, 4), (11, 4), (61, 4), (5, 5), (94, 3)])
def test_layers_are_those_that_vllm_gives_a_stage(layers: int, stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    shape = parse_model_shape({**QWEN3_MOE, "num_hidden_layers": layers})
    shards = split_engine(GenerationParallelConfig(pipeline=stages, tensor=2), shape)
    expected = [tuple(range(*get_pp_indices(layers, stage, stages))) for stage in range(stages)]
    assert [shard.layers for shard in shards[::2]] == expected
    assert [shard.tensor.index for shard in shards] == [0, 1] * stages


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (7, 2), (10, 4), (128, 8), (3, 3)])
def test_experts_are_those_that_vllm_gives_a_rank(experts: int, ranks: int) -> None:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    shape = parse_model_shape({**QWEN3_MOE, "num_experts": experts})
    for shard in split_engine(GenerationParallelConfig(tensor=ranks, expert=ranks), shape):
        count, numbers, _ = determine_expert_map(ranks, shard.tensor.index, experts)
        local_experts = [expert for expert, number in enumerate(numbers.tolist()) if number >= 0]
        assert local_experts == list(range(*shard.experts))
        assert count == len(local_experts)
        assert shard.expert_tensor.count == 1, "each has whole experts"


SIZES = [
    (2, 2),
    (2, 3),
    (8, 128),
    (8, 256),
    (4, 32),
    (22, 512),
    (6, 64),
    (3, 1000),
    (1, 16),
    (1, 128),
    (1, 1),
    (8, 255),
]
"""Experts of a token, and in a layer."""


def draw(tokens: int, layers: int, top_k: int, experts: int) -> NDArray[np.int64]:
    """[tokens, layers, top_k]: distinct experts, or -1 for all of a layer's."""
    numbers = random.Random(experts)
    rows = [
        [numbers.sample(range(experts), top_k) if numbers.random() < 0.8 else [-1] * top_k for _ in range(layers)]
        for _ in range(tokens)
    ]
    return np.array(rows)


def as_bits(chosen: list[int], experts: int) -> bytes:
    """A layer's bytes, written as a string of digits."""
    single = len(chosen) == 1
    width = max(1, math.ceil(math.log2(experts + single)))
    if chosen[0] < 0:
        digits = "0" * (width * len(chosen))
    else:
        digits = "".join(format(expert + single, f"0{width}b") for expert in reversed(chosen))
    count = math.ceil(len(digits) / 8)
    return int(digits, 2).to_bytes(count, "little")


@pytest.mark.parametrize(("top_k", "experts"), SIZES)
def test_bytes_are_those_of_a_string_of_bits(top_k: int, experts: int) -> None:
    form = RoutedForm(layers=(0, 1, 4), top_k=top_k, experts=experts)
    chosen = draw(20, 3, top_k, experts)
    packed = form.pack(chosen)
    expected = [b"".join(as_bits(layer, experts) for layer in row) for row in chosen.tolist()]
    assert [row.tobytes() for row in packed] == expected
    assert packed.shape == (20, form.token_bytes)
    np.testing.assert_array_equal(form.unpack(packed), chosen)


def test_every_expert_comes_back() -> None:
    for top_k, experts in SIZES:
        form = RoutedForm(layers=(0,), top_k=top_k, experts=experts)
        for dtype in (np.uint8, np.uint16, np.int64):
            if experts - 1 <= np.iinfo(dtype).max:
                chosen = (np.arange(experts)[:, None, None] + np.arange(top_k)).astype(np.int64) % experts
                np.testing.assert_array_equal(form.unpack(form.from_engine(chosen.astype(dtype))), chosen)


@pytest.mark.parametrize(
    ("layers", "top_k", "experts", "token_bytes"),
    [(48, 8, 128, 336), (40, 8, 256, 320), (58, 8, 256, 464)],
    ids=["Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "DeepSeek-V3"],
)
def test_bytes_of_a_token(layers: int, top_k: int, experts: int, token_bytes: int) -> None:
    assert RoutedForm(tuple(range(layers)), top_k, experts).token_bytes == token_bytes


def test_a_rank_selects_its_layers() -> None:
    form = RoutedForm(layers=(0, 2, 3), top_k=2, experts=8)
    chosen = draw(6, 3, 2, 8)
    for layers in ([1], [0, 2], [2, 1, 0], []):
        selection = form.select_layers(form.pack(chosen), layers)
        np.testing.assert_array_equal(form.unpack(selection), chosen[:, layers])


def test_layers_without_experts_are_left_out() -> None:
    form = RoutedForm.from_shape(parse_model_shape({**QWEN3_MOE, "mlp_only_layers": [1]}))
    assert form == RoutedForm(layers=(0, 2, 3), top_k=2, experts=8)
    chosen = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2) % 8
    assert form.unpack(form.from_engine(chosen)).tolist() == [[row[0], row[2], row[3]] for row in chosen.tolist()]


def test_what_does_not_fit_the_model_is_a_defect() -> None:
    form = RoutedForm(layers=(0, 3), top_k=2, experts=8)
    with pytest.raises(AssertionError, match="3 layers, and layer 3 has experts"):
        form.from_engine(np.zeros((1, 3, 2), np.uint8))
    with pytest.raises(AssertionError, match="4 experts of a token, expected 2"):
        form.from_engine(np.zeros((1, 4, 4), np.uint8))
    with pytest.raises(AssertionError, match="3 rows of 2 tokens"):
        form.concatenate([(2, np.zeros((3, 2), np.uint8))])
