"""Plans of refits that send adapters alone: who gets which matrices, and what they are in bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config, LoraConfig, PolicyConfig, RefitConfig
from megatron_grpo.models.adapter_names import choose_slot_rank, make_policy_slot, measure_adapters
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.planning.refit_summary import find_lone_adapters, summarize_refit
from megatron_grpo.preflight.refit_memory import estimate_slot_bytes, needs_conversion
from megatron_grpo.weight_sync.adapter_plan import plan_adapters
from megatron_grpo.weight_sync.pieces import NO_RELAY
from tests.support.engine_table import table_boxes
from tests.support.hf_configs import QWEN3_MOE
from tests.support.refit_models import DENSE as DENSE_CONFIG

DENSE, MOE = parse_model_shape(DENSE_CONFIG), parse_model_shape(QWEN3_MOE)
LORA = LoraConfig(rank=4)


def test_every_worker_gets_the_adapters_of_its_layers_and_experts_from_their_stage() -> None:
    training = ParallelConfig(tensor=2, pipeline=2, expert=2, sequence=True)
    generation = GenerationParallelConfig(tensor=2, pipeline=2, expert=2, data=2)
    adapters, boxes = measure_adapters(MOE, LORA), table_boxes(generation, MOE)
    pieces = plan_adapters(MOE, adapters, split_policy(training, MOE), boxes, 2, "bfloat16", 1 << 20)
    names, half = list(adapters), MOE.layers // 2
    assert MOE.experts is not None
    for piece in pieces:
        name, (rows, columns) = names[piece["tensor"]], adapters[names[piece["tensor"]]]
        layer = int(name.split(".")[2])
        assert piece["source"] == 2 * (layer >= half), "the first rank of the stage"
        assert piece["target"] % 4 // 2 == (layer >= half), "a rank of the engine's stage"
        if ".experts." in name:
            assert piece["target"] % 2 == int(name.split(".")[5]) * 2 // MOE.experts.count
        assert piece["ranges"].tolist() == [[0, rows, 1], [0, columns, 1], [0, 0, 0], [0, 0, 0]]
        assert piece["bytes"] == 2 * rows * columns
        assert piece["relay"] == NO_RELAY
    copies = Counter(names[number] for number in pieces["tensor"])
    assert copies == {name: 2 if ".experts." in name else 4 for name in names}


def test_adapters_that_no_rank_of_the_node_has_go_through_its_own() -> None:
    adapters, boxes = measure_adapters(DENSE, LORA), table_boxes(GenerationParallelConfig(), DENSE)
    shards = split_policy(ParallelConfig(pipeline=2), DENSE)
    pieces = plan_adapters(DENSE, adapters, shards, boxes, 2, "float32", 1 << 20, devices_per_node=1)
    assert {(piece["source"], piece["target"], piece["relay"]) for piece in pieces} == {
        (0, 0, NO_RELAY),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, NO_RELAY),
    }


def test_names_and_shapes_are_those_of_peft() -> None:
    adapters = measure_adapters(DENSE, LoraConfig(rank=4, target_modules=["linear_qkv"]))
    hidden, heads = DENSE.hidden, DENSE.attention_heads * DENSE.head_dim
    assert adapters["model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, hidden)
    assert adapters["model.layers.0.self_attn.q_proj.lora_B.weight"] == (heads, 4)
    assert len(adapters) == 2 * 3 * DENSE.layers
    policy = PolicyConfig(lora=LORA)
    assert make_policy_slot(policy, DENSE).modules == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
    assert "experts" in make_policy_slot(policy, MOE).modules


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (17, 32), (512, 512)])
def test_a_slot_is_the_smallest_that_holds_the_rank(rank: int, slot: int) -> None:
    assert choose_slot_rank(rank) == slot


def test_a_plan_counts_adapters_and_no_open_layers() -> None:
    config = Config()
    config.policy = replace(config.policy, lora=LORA, precision="bfloat16")
    config.refit = RefitConfig(adapters="alone")
    config.cluster.gpus_per_node = 8
    config.generation.engine_args = {"quantization": "fp8_per_block"}
    adapters = find_lone_adapters(config, DENSE)
    assert adapters is not None
    elements = sum(rows * columns for rows, columns in adapters.values())
    summary = summarize_refit(
        DENSE, ParallelConfig(), GenerationParallelConfig(data=3), "bfloat16", 1 << 20, adapters=adapters
    )
    assert summary.bytes == 3 * 2 * elements
    assert not needs_conversion(config, DENSE, None)
    assert estimate_slot_bytes(config, DENSE) == 2 * 2 * elements, "vLLM has no slots of rank 4, but of 8"
    config.refit.adapters = "merged"
    assert find_lone_adapters(config, DENSE) is None
    assert needs_conversion(config, DENSE, None)
    assert estimate_slot_bytes(config, DENSE) == 0
