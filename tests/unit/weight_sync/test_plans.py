"""Plans of refits: which rank sends what to which engine, adapters alone, and memory in common."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.cluster.allocators import choose_cuda_settings
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config, LoraConfig, PolicyConfig, RefitConfig
from megatron_grpo.models.adapter_names import choose_slot_rank, make_policy_slot, measure_adapters
from megatron_grpo.models.families import FAMILIES, build_weight_map
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.models.weight_map import WeightEntry, index_tensors, map_rows
from megatron_grpo.planning.refit_summary import find_lone_adapters, summarize_refit
from megatron_grpo.preflight.refit_memory import estimate_slot_bytes, needs_conversion
from megatron_grpo.weight_sync import shared_memory, transfer_plan
from megatron_grpo.weight_sync.adapters_alone import plan_adapters
from megatron_grpo.weight_sync.boxes import Box, BoxLayout, Range, list_full_boxes, to_slices
from megatron_grpo.weight_sync.pieces import NO_RELAY, find_ranges, read_ranges
from megatron_grpo.weight_sync.shared_memory import CudaMemory, HostMemory, choose_shared_memory
from megatron_grpo.weight_sync.transfer_plan import plan_messages
from tests.support.coming_layouts import SHAPE
from tests.support.engine_table import table_boxes
from tests.support.hf_configs import QWEN3_MOE
from tests.support.refit_models import DENSE
from tests.support.refit_models import DENSE as DENSE_CONFIG


@pytest.mark.parametrize(
    ("training", "generation"), [({"data": 4}, {"tensor": 2, "data": 2}), ({"tensor": 2, "data": 2}, {"data": 4})]
)
def test_beside_each_other_nothing_comes_from_further_than_it_must(
    training: dict[str, int], generation: dict[str, int]
) -> None:
    """An engine rank keeps weights that the policy rank on its device holds; no other rank sends them."""
    shape = parse_model_shape(DENSE)
    sources = split_policy(ParallelConfig(**training), shape)
    engine = table_boxes(GenerationParallelConfig(**generation), shape)
    dtypes = ["float32"] * len(build_weight_map(shape))
    engines = generation["data"]
    plans = [plan_messages(shape, sources, engine, engines, dtypes, 2**21, devices_per_node=node) for node in (4, None)]
    near, far = (plan["source"] == plan["target"] for plan in plans)
    assert far.mean() < near.mean() or "tensor" in training, "else the shares have it so already"
    if "tensor" not in training:
        assert near.all()
        return
    entries = build_weight_map(shape)
    keys = list(index_tensors(entries, shape).values())
    for piece in plans[0][~near]:
        entry = entries[piece["entry"]]
        assert entry.axis is not None, "what is not split is everywhere"
        slices = [entry.list_slices(shape, keys[piece["tensor"]].layer, part, 2, 0) for part in range(2)]
        parts = [find_ranges(rank_slices[piece["section"]]) for rank_slices in slices]
        own_ranges, sent = parts[piece["target"] % 2], read_ranges(piece)
        assert not all(
            have.begin <= want.begin and want.end <= have.end for have, want in zip(own_ranges, sent, strict=True)
        )
        assert piece["source"] % 2 != piece["target"] % 2
    unchanged = [name for name in plans[0].dtype.names or () if name != "source"]
    assert all(np.array_equal(plans[0][name], plans[1][name]) for name in unchanged)


@pytest.mark.parametrize(
    ("training", "is_apart"), [({"tensor": 2, "data": 2}, False), ({"tensor": 2, "pipeline": 2}, True)]
)
def test_what_another_node_has_is_counted_apart(training: dict[str, int], is_apart: bool) -> None:
    """Two nodes of two GPUs have an engine of two ranks each; a stage of the policy is on one."""
    shape, generation = parse_model_shape(DENSE), GenerationParallelConfig(tensor=2, data=2)
    summary = summarize_refit(shape, ParallelConfig(**training), generation, "float32", 2**21, devices_per_node=2)
    crossing = {link: size for link, size in summary.links.items() if link[0] // 2 != link[1] // 2}
    by_rank = [sum(size for link, size in crossing.items() if link[end] == rank) for end in (0, 1) for rank in range(4)]
    assert summary.relayed_bytes == max(by_rank)
    assert (summary.relayed_bytes > 0) == is_apart


TABLES = {"qwen3_next": FAMILIES["qwen3_next"].tables, "gpt_oss": FAMILIES["gpt_oss"].tables}
ROWS = {name: tuple(row for table in tables for row in map_rows(table)) for name, tables in TABLES.items()}
LAYOUTS = {
    "one rank": ParallelConfig(),
    "tensor": ParallelConfig(tensor=2),
    "experts": ParallelConfig(tensor=2, data=2, expert=2, expert_tensor=2),
}


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tables", TABLES)
def test_pieces_tile_every_box_and_lie_in_a_slice_of_their_sender(
    tables: str, layout: str, halves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ROWS[tables]
    monkeypatch.setattr(transfer_plan, "build_weight_map", lambda _: rows)
    keys = index_tensors(rows, SHAPE)
    sizes = {name: key.tensor.measure(SHAPE.sizes) for name, key in keys.items()}
    engine = [cut_boxes(list_full_boxes(sizes), halves)]
    shards = split_policy(LAYOUTS[layout], SHAPE)
    pieces = transfer_plan.plan_messages(SHAPE, shards, engine, 1, ["float32"] * len(rows), 2**10)
    counts = {name: torch.zeros(size) for name, size in sizes.items()}
    tensors = list(keys.items())
    for piece in pieces:
        name, key = tensors[piece["tensor"]]
        entry: WeightEntry = rows[key.row]
        ranges, shard, box = read_ranges(piece), shards[piece["source"]], engine[0][piece["box"]]
        assert box.tensor == name
        counts[name][to_slices(ranges)] += 1
        split, expert = shard.find_split(entry), ranges[0].begin if entry.is_stacked else key.expert
        assert not entry.per_expert or shard.experts[0] <= expert < shard.experts[1]
        slices = entry.list_slices(SHAPE, key.layer, split.index, split.count, expert)
        for outer in (find_ranges(slices[piece["section"]]), box.layout.tensor):
            assert all(a.begin <= b.begin and b.end <= a.end for a, b in zip(outer, ranges, strict=True))
    assert all((count == 1).all() for count in counts.values())
    assert any(entry.is_stacked for entry in rows)
    assert tables == "gpt_oss" or {*pieces["section"].tolist()} == {0, 1, 2}


def cut_boxes(boxes: list[Box], halves: int) -> list[Box]:
    """Boxes cut along their last dimension, wherever sections begin."""
    parts = []
    for box in boxes:
        *outer, last = box.layout.tensor
        width = -(-last.end // halves)
        for begin in range(0, last.end, width):
            ranges = (*outer, Range(begin, min(begin + width, last.end)))
            parts.append(box._replace(layout=BoxLayout(ranges, ranges, tuple(range(len(ranges))))))
    return parts


DENSE_SHAPE, MOE_SHAPE = parse_model_shape(DENSE_CONFIG), parse_model_shape(QWEN3_MOE)
LORA = LoraConfig(rank=4)


def test_every_worker_gets_the_adapters_of_its_layers_and_experts_from_their_stage() -> None:
    training = ParallelConfig(tensor=2, pipeline=2, expert=2, sequence=True)
    generation = GenerationParallelConfig(tensor=2, pipeline=2, expert=2, data=2)
    adapters, boxes = measure_adapters(MOE_SHAPE, LORA), table_boxes(generation, MOE_SHAPE)
    pieces = plan_adapters(MOE_SHAPE, adapters, split_policy(training, MOE_SHAPE), boxes, 2, "bfloat16", 1 << 20)
    names, half = list(adapters), MOE_SHAPE.layers // 2
    assert MOE_SHAPE.experts is not None
    for piece in pieces:
        name, (rows, columns) = names[piece["tensor"]], adapters[names[piece["tensor"]]]
        layer = int(name.split(".")[2])
        assert piece["source"] == 2 * (layer >= half), "the first rank of the stage"
        assert piece["target"] % 4 // 2 == (layer >= half), "a rank of the engine's stage"
        if ".experts." in name:
            assert piece["target"] % 2 == int(name.split(".")[5]) * 2 // MOE_SHAPE.experts.count
        assert piece["ranges"].tolist() == [[0, rows, 1], [0, columns, 1], *[[0, 0, 0]] * 3]
        assert piece["bytes"] == 2 * rows * columns
        assert piece["relay"] == NO_RELAY
    copies = Counter(names[number] for number in pieces["tensor"])
    assert copies == {name: 2 if ".experts." in name else 4 for name in names}


def test_adapters_that_no_rank_of_the_node_has_go_through_its_own() -> None:
    adapters, boxes = measure_adapters(DENSE_SHAPE, LORA), table_boxes(GenerationParallelConfig(), DENSE_SHAPE)
    shards = split_policy(ParallelConfig(pipeline=2), DENSE_SHAPE)
    pieces = plan_adapters(DENSE_SHAPE, adapters, shards, boxes, 2, "float32", 1 << 20, devices_per_node=1)
    assert {(piece["source"], piece["target"], piece["relay"]) for piece in pieces} == {
        (0, 0, NO_RELAY),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, NO_RELAY),
    }


def test_names_and_shapes_are_those_of_peft() -> None:
    adapters = measure_adapters(DENSE_SHAPE, LoraConfig(rank=4, target_modules=["linear_qkv"]))
    hidden, heads = DENSE_SHAPE.hidden, DENSE_SHAPE.attention_heads * DENSE_SHAPE.head_dim
    assert adapters["model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, hidden)
    assert adapters["model.layers.0.self_attn.q_proj.lora_B.weight"] == (heads, 4)
    assert len(adapters) == 2 * 3 * DENSE_SHAPE.layers
    policy = PolicyConfig(lora=LORA)
    assert make_policy_slot(policy, DENSE_SHAPE).modules == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
    assert "experts" in make_policy_slot(policy, MOE_SHAPE).modules


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (17, 32), (512, 512)])
def test_a_slot_is_the_smallest_that_holds_the_rank(rank: int, slot: int) -> None:
    assert choose_slot_rank(rank) == slot


def test_a_plan_counts_adapters_and_no_open_layers() -> None:
    config = Config()
    config.policy = replace(config.policy, lora=LORA, precision="bfloat16")
    config.refit = RefitConfig(adapters="alone")
    config.cluster.gpus_per_node = 8
    config.generation.engine_args = {"quantization": "fp8_per_block"}
    adapters = find_lone_adapters(config, DENSE_SHAPE)
    elements = sum(rows * columns for rows, columns in adapters.values())
    summary = summarize_refit(
        DENSE_SHAPE, ParallelConfig(), GenerationParallelConfig(data=3), "bfloat16", 1 << 20, adapters=adapters
    )
    assert summary.bytes == 3 * 2 * elements
    assert not needs_conversion(config, DENSE_SHAPE, None)
    assert estimate_slot_bytes(config, DENSE_SHAPE) == 2 * 2 * elements, "vLLM has no slots of rank 4, but of 8"
    config.refit.adapters = "merged"
    assert find_lone_adapters(config, DENSE_SHAPE) is None
    assert needs_conversion(config, DENSE_SHAPE, None)
    assert estimate_slot_bytes(config, DENSE_SHAPE) == 0


CPU, GPU = torch.device("cpu"), torch.device("cuda")

READ = """
import sys
from megatron_grpo.weight_sync.shared_memory import HostMemory
memory = HostMemory.map_address(sys.argv[1:])
print(None if memory is None else memory.tolist())
"""


def _seen_elsewhere(address: list[Any]) -> str:
    command = [sys.executable, "-c", READ, *map(str, address)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_another_process_sees_what_is_written() -> None:
    shared = HostMemory(5)
    shared.tensor.copy_(torch.tensor([1, 2, 3, 4, 250], dtype=torch.uint8))
    assert _seen_elsewhere(shared.export_address()) == "[1, 2, 3, 4, 250]"


def test_what_is_written_later_is_seen_too_and_the_memory_ends_with_its_users() -> None:
    shared = HostMemory(1 << 20)
    address = shared.export_address()
    view = HostMemory.map_address(address)
    shared.tensor[7] = 9
    assert view[7] == 9
    del shared
    assert view[7] == 9, "who sees it keeps it"
    assert HostMemory.map_address(address) is None


@pytest.mark.parametrize("wrong", ["process", "file", "name"])
def test_an_address_that_is_not_exactly_right_is_none(wrong: str, tmp_path: Path) -> None:
    """As a process of another machine would read it, where files of these numbers may be anything."""
    shared = HostMemory(64)
    process, file, name = shared.export_address()
    with (tmp_path / name).open("wb") as other_file:
        addresses = {
            "process": (2**22 + 1, file, name),
            "file": (process, other_file.fileno(), name),
            "name": (process, file, HostMemory(64).export_address()[-1]),
        }
        assert HostMemory.map_address(addresses[wrong]) is None
    assert HostMemory.map_address([process, file, name]) is not None


def test_an_address_on_a_gpu_travels_as_json_and_is_what_torch_rebuilds_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the handles as text; `rebuild_cuda_tensor` gets what `reduce_tensor` gave, on this process's GPU."""
    tensor, (memory, counter, event) = torch.zeros(3, dtype=torch.uint8), map(os.urandom, (66, 12, 64))
    handle = (memory, 2**40, 512, False, counter, 4, event, True)
    reduced = (torch.Tensor, tensor.size(), (1,), 7, torch.UntypedStorage, torch.uint8, 1, *handle)
    monkeypatch.setattr(shared_memory, "reduce_tensor", lambda _: (None, reduced))
    monkeypatch.setattr(shared_memory, "read_gpu_uuid", lambda index: f"GPU-{'abc'[index]}")
    shared = object.__new__(CudaMemory)
    shared.tensor = tensor
    address = json.loads(json.dumps(shared.export_address()))

    monkeypatch.setattr(shared_memory, "rebuild_cuda_tensor", lambda *arguments: arguments)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(shared_memory, "read_gpu_uuid", lambda index: f"GPU-{'bca'[index]}")
    assert CudaMemory.map_address(address) == (
        torch.Tensor,
        (3,),
        (1,),
        7,
        torch.UntypedStorage,
        torch.uint8,
        0,
        *handle,
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="its weights are on GPU GPU-b, and this process sees "):
        CudaMemory.map_address(address)


def test_memory_for_other_processes_is_no_expandable_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, applied_settings = [choose_cuda_settings()], []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", choose_cuda_settings())
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: applied_settings.append(settings[-1]))
    CudaMemory(8)
    assert applied_settings == ["expandable_segments:False"]
    assert settings[-1] == settings[0]


@pytest.mark.parametrize(
    ("device", "in_hosts", "on_gpus", "kind"),
    [
        (CPU, True, False, HostMemory),
        (CPU, False, False, None),
        (CPU, True, True, HostMemory),
        (GPU, True, False, None),
        (GPU, False, True, CudaMemory),
    ],
)
def test_who_hands_messages_over_in_what(
    device: torch.device, in_hosts: bool, on_gpus: bool, kind: type | None
) -> None:
    """GPUs of their own send over NCCL; the same GPUs cannot."""
    assert choose_shared_memory(device, in_hosts=in_hosts, on_gpus=on_gpus) is kind
