"""Boxes that are assumed of an engine without vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import measure_tensors, parse_model_shape
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.weight_sync.boxes import to_slices
from tests.support.engine_configs import ENGINE_CONFIGS

LAYOUTS = [
    GenerationParallelConfig(tensor=2, expert=2),
    GenerationParallelConfig(tensor=4),
    GenerationParallelConfig(tensor=2, pipeline=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["expert parallel", "more ranks than keys", "pipeline"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss", "qwen3_moe"])
def test_an_engines_ranks_hold_every_number(family: str, layout: GenerationParallelConfig) -> None:
    shape = parse_model_shape(ENGINE_CONFIGS[family])
    covered = {name: np.zeros(size, bool) for name, size in measure_tensors(shape).items()}
    for boxes in assume_boxes(shape, layout):
        for box in boxes:
            covered[box.tensor][to_slices(box.cut.tensor)] = True
    assert [name for name, numbers in covered.items() if not numbers.all()] == []
