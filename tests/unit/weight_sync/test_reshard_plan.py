"""Plans of refits shard to shard, carried out on real tensors, against vLLM's layout written out; and large ones by
arithmetic."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.hf_weights import merge_slices, split_parameter
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, split_policy
from megatron_grpo.models.weight_map import TensorKey, WeightEntry, WeightSlice, index_tensors, pad_vocab
from megatron_grpo.planning.engine_shards import split_engine
from megatron_grpo.preflight.engine_checks import find_cut_blocks
from megatron_grpo.weight_sync.boxes import count_elements, to_slices
from megatron_grpo.weight_sync.model_writer import ModelWriter
from megatron_grpo.weight_sync.pieces import Pieces, align, find_ranges, lay_out_pieces, read_ranges, split_messages
from megatron_grpo.weight_sync.shard_sender import pack_piece
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages, schedule_messages
from tests.support.engine_table import table_boxes
from tests.support.hf_configs import QWEN3_MOE, read_configs
from tests.support.refit_models import DENSE, LATENT, SHAPES, full_tensor, model_of, vllm_parameters
from tests.support.released_configs import NANO, QWEN3_5_27B

MOE = parse_model_shape(QWEN3_MOE)


def cut(part: WeightSlice) -> Tensor:
    return full_tensor(part.name, part.shape)[part.region]


def list_tensors(shape: ModelShape) -> list[tuple[WeightEntry, TensorKey]]:
    entries = build_weight_map(shape)
    return [(entries[key.row], key) for key in index_tensors(entries, shape).values()]


def sent_piece(piece: Any, shard: RankShard, shape: ModelShape, tensor: tuple[WeightEntry, TensorKey]) -> Tensor:
    """[rows, columns]: what a rank of the policy cuts out of its own parameter, which Megatron-Core lays out."""
    entry, key = tensor
    part = shard.expert_tensor if entry.per_expert else shard.tensor
    slices = entry.list_slices(shape, key.layer, part.index, part.count, key.expert)
    rows = pad_vocab(shape, part.count) // part.count
    parameter = merge_slices(entry, [cut(tensor_slice) for tensor_slice in slices], shape, rows)
    section = split_parameter(entry, parameter, slices, shape)[piece["section"]]
    first = [indices.begin for indices in find_ranges(slices[piece["section"]])]
    bounds = [
        (part.begin - begin, part.end - begin, size)
        for part, begin, size in zip(read_ranges(piece), first, section.shape, strict=True)
    ]
    assert all(0 <= begin < end <= size for begin, end, size in bounds)
    return section[tuple(slice(begin, end) for begin, end, _ in bounds)]


def count_open_layers(pieces: Pieces) -> int:
    """Most layers of which a target has got some pieces of experts, and not all."""
    keys, entries = list(index_tensors(build_weight_map(MOE), MOE).values()), build_weight_map(MOE)
    most_open = 0
    for target in set(pieces["target"].tolist()):
        messages = split_messages(pieces[pieces["target"] == target])
        layers = [
            [keys[piece["tensor"]].layer for piece in message if entries[piece["entry"]].per_expert]
            for message in messages
        ]
        last = {layer: number for number, message_layers in enumerate(layers) for layer in message_layers}
        open_layers: set[int] = set()
        for number, message_layers in enumerate(layers):
            open_layers |= set(message_layers)
            most_open = max(most_open, len(open_layers))
            open_layers -= {layer for layer in open_layers if last[layer] == number}
    return most_open


@pytest.mark.parametrize("pipeline", [1, 4])
def test_a_worker_that_needs_layer_order_has_one_layer_open(pipeline: int) -> None:
    """Else every stage of the policy sends a layer, and every rank of a stage parts of several."""
    training = ParallelConfig(pipeline=pipeline, data=2, expert=2)
    engine = table_boxes(GenerationParallelConfig(tensor=2, pipeline=2), MOE)
    dtypes = ["float32"] * len(build_weight_map(MOE))
    shards = split_policy(training, MOE)
    together = plan_messages(MOE, shards, engine, 2, dtypes, 1024)
    by_layer = plan_messages(MOE, shards, engine, 2, dtypes, 1024, by_layer=True)
    assert count_open_layers(together) > 1
    assert count_open_layers(by_layer) == 1
    assert sorted(map(str, by_layer[list(PLANNED)].tolist())) == sorted(map(str, together[list(PLANNED)].tolist()))
    sources = by_layer[by_layer["turn"] < 4]["source"] // 2
    assert len(set(sources.tolist())) > 1 or pipeline == 1, "engines begin at different layers"


def plan(shape: ModelShape, training: ParallelConfig, generation: GenerationParallelConfig, bucket: int) -> Pieces:
    dtypes = ["float32"] * len(build_weight_map(shape))
    engine = table_boxes(generation, shape)
    return plan_messages(shape, split_policy(training, shape), engine, generation.data, dtypes, bucket)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, ParallelConfig, GenerationParallelConfig, int]:
    family = draw(st.sampled_from(sorted(SHAPES)))
    shape = parse_model_shape(SHAPES[family])
    pipeline = draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.sampled_from([1, 2] if pipeline == 2 else [1]))
    tensor, data = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    expert, expert_tensor = 1, 1
    if shape.experts is not None:
        expert = draw(st.sampled_from([n for n in (1, 2, 4) if tensor * data % n == 0]))
        expert_tensor = draw(st.sampled_from([n for n in (1, 2) if tensor * data % (n * expert) == 0]))
    training = ParallelConfig(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=chunks,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        first_stage_layers=draw(st.sampled_from([None, 1])) if pipeline == 2 and chunks == 1 else None,
    )
    width = draw(st.sampled_from([1, 2, 4]))
    generation = GenerationParallelConfig(
        tensor=width,
        pipeline=draw(st.sampled_from([1, 2, 3])),
        data=draw(st.sampled_from([1, 2])),
        expert=draw(st.sampled_from([1, width])) if shape.experts is not None else 1,
    )
    return shape, training, generation, draw(st.sampled_from([96, 1024, 2**20]))


@pytest.mark.slow
@given(cases())
@settings(max_examples=25)
def test_every_number_of_every_rank_comes_once_and_from_where_it_is(case: Any) -> None:
    shape, training, generation, bucket = case
    sources, engine = split_policy(training, shape), split_engine(generation, shape)
    scheduled, boxes = plan(shape, training, generation, bucket), table_boxes(generation, shape)
    tensors = list_tensors(shape)
    for target in range(len(engine) * generation.data):
        shard = engine[target % len(engine)]
        expected = vllm_parameters(shape, shard)
        target_pieces = scheduled[scheduled["target"] == target]
        model = model_of(expected)
        writer = ModelWriter(model, torch.float32, boxes[target % len(engine)], [target_pieces])
        for position, piece in enumerate(target_pieces):
            sent = sent_piece(piece, sources[piece["source"]], shape, tensors[piece["tensor"]])
            writer.write(0, position, sent)
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
        # As many as there are, all of them right: none came twice.
        brought = sum(count_elements(read_ranges(piece)) for piece in target_pieces)
        padding = (-(-shape.vocab // 64) * 64 - shape.vocab) * shape.hidden
        assert (
            sum(t.numel() for t in expected.values()) - 2 * padding
            <= brought
            <= sum(t.numel() for t in expected.values())
        )


@pytest.mark.slow
@given(cases())
@settings(max_examples=25)
def test_no_circle_of_ranks_that_wait_for_each_other(case: Any) -> None:
    """Ranks that can have a single message under way, each in its own order, get through all of them."""
    shape, training, generation, bucket = case
    pieces = plan(shape, training, generation, bucket)
    scheduled = schedule_messages(pieces, bucket)
    assert sorted(map(str, scheduled[list(PLANNED)].tolist())) == sorted(map(str, pieces[list(PLANNED)].tolist()))
    queues = {
        (side, rank): [
            (int(pieces["source"][0]), int(pieces["target"][0]))
            for pieces in split_messages(scheduled[scheduled[side] == rank])
        ]
        for side in ("source", "target")
        for rank in set(scheduled[side].tolist())
    }
    while any(queues.values()):
        ready = [
            (source, target)
            for (side, source), queue in queues.items()
            if side == "source" and queue
            for _, target in queue[:1]
            if queues["target", target][:1] == [(source, target)]
        ]
        assert ready, "nobody can go on"
        for source, target in ready:
            del queues["source", source][0], queues["target", target][0]
    for message in (
        m for rank in set(scheduled["source"]) for m in split_messages(scheduled[scheduled["source"] == rank])
    ):
        assert align(message["bytes"]).sum() <= bucket or len(message) <= 2


PLANNED = ("source", "target", "entry", "tensor", "section", "ranges", "box", "bytes")

_CONFIGS = read_configs("model_configs")
DEEPSEEK_V3 = LATENT | _CONFIGS["large_deepseek_v3"]
QWEN3_235B = QWEN3_MOE | _CONFIGS["large_qwen3_moe"]
LARGE = {
    "deepseek_v3": (
        DEEPSEEK_V3,
        ParallelConfig(tensor=8, pipeline=16, data=8, expert=16, first_stage_layers=3, last_stage_layers=2),
        GenerationParallelConfig(tensor=8, pipeline=4, data=2),
    ),
    "qwen3_235b": (
        QWEN3_235B,
        ParallelConfig(tensor=4, pipeline=16, data=16, expert=8, first_stage_layers=5, last_stage_layers=5),
        GenerationParallelConfig(tensor=8, pipeline=2, data=2, expert=8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=pytest.mark.slow), "qwen3_235b"])
def test_large_layouts_by_arithmetic(name: str) -> None:
    """Disjoint boxes that add up to a rank's numbers cover each once; senders share the work."""
    raw, training, generation = LARGE[name]
    shape = parse_model_shape(raw)
    engine, bucket = split_engine(generation, shape), 256 * 2**20
    pieces = plan(shape, training, generation, bucket)
    for target in (0, len(engine) // 2, len(engine) * generation.data - 1):
        shard = engine[target % len(engine)]
        target_pieces = pieces[pieces["target"] == target]
        keys = target_pieces[["tensor"]]
        begins = target_pieces["ranges"][:, :2, 0].T
        order = np.lexsort((*begins[::-1], *(keys[k] for k in keys.dtype.names[::-1])))
        ordered = target_pieces[order]
        same_tensor = keys[order][1:] == keys[order][:-1]
        # Strips of one tensor follow each other in rows, or lie side by side in columns.
        apart = (ordered["ranges"][1:, :2, 0] >= ordered["ranges"][:-1, :2, 1]).any(axis=1)
        assert (apart | ~same_tensor).all()
        assert target_pieces["bytes"].sum() == 4 * owned_numbers(shape, shard)
    load = np.bincount(pieces["source"], weights=pieces["bytes"], minlength=training.world_size)
    by_stage = load.reshape(training.pipeline, -1)
    assert (by_stage.max(1) - by_stage.min(1)).max() <= 0.35 * load.mean(), "replicas and neighbours share"
    assert align(np.array([1, 16, 17])).tolist() == [16, 16, 32]


def owned_numbers(shape: ModelShape, shard: RankShard) -> int:
    """How many numbers a rank of an engine has, without padding, from the sizes of the model."""
    total = 0
    for entry in build_weight_map(shape):
        total += _numbers_of(entry, shape, shard)
    return total


def _numbers_of(entry: WeightEntry, shape: ModelShape, shard: RankShard) -> int:
    split = {"vocab", "ffn", "groups", "heads", "expert_ffn", "shared_ffn"}
    if entry.copy:
        return 0
    layers = [n for n in shard.layers if entry.kind is None or entry.kind in shape.list_kinds(n)]
    if entry.half is None:
        layers = [0] if (shard.has_embedding if entry.name.startswith("embedding") else shard.has_output) else []
    part = shard.expert_tensor if entry.per_expert else shard.tensor
    numbers = 0
    for tensor in entry.hf:
        size = int(np.prod(tensor.measure(shape.sizes)))
        names = re.findall(r"\w+", " ".join(tensor.dims))
        if {"key", "value"} & set(names):
            size = size // shape.key_value_heads * max(shape.key_value_heads // part.count, 1)
        elif "vocab" in names:
            assert shape.vocab % 64 == 0, "no rank has padding"
            size //= part.count
        elif split & set(names):
            size //= part.count
        numbers += size
    experts = shard.experts[1] - shard.experts[0] if entry.per_expert else 1
    return numbers * experts * len(layers)


def test_a_model_that_is_not_filled_is_refused() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    shape, layouts = parse_model_shape({**DENSE, "vocab_size": 64}), (ParallelConfig(), GenerationParallelConfig())
    [shard], [boxes] = split_engine(layouts[1], shape), table_boxes(layouts[1], shape)
    model = model_of(vllm_parameters(shape, shard) | {"model.layers.0.extra.weight": torch.zeros(3)})
    record_metadata_for_reloading(model)
    with pytest.raises(ValueError, match=r"use broadcast. .*layers.0.extra.weight: 0 of 3 numbers$"):
        ModelWriter(model, torch.float32, boxes, [plan(shape, *layouts, 2**20)])


def test_a_parameter_of_which_pieces_are_missing_is_refused() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    shape, layouts = parse_model_shape({**DENSE, "vocab_size": 64}), (ParallelConfig(), GenerationParallelConfig())
    [shard], [boxes] = split_engine(layouts[1], shape), table_boxes(layouts[1], shape)
    model = model_of(vllm_parameters(shape, shard))
    record_metadata_for_reloading(model)
    pieces = plan(shape, *layouts, 2**20)
    ModelWriter(model, torch.float32, boxes, [pieces])
    fewer = pieces[pieces["ranges"][:, 0, 1] != shape.hidden]
    with pytest.raises(ValueError, match=r"model.norm.weight: 0 of \d+ numbers"):
        ModelWriter(model, torch.float32, boxes, [fewer])


def test_a_tied_head_is_filled_with_the_embedding() -> None:
    """vLLM's head is a parameter of its own in the memory of the embedding."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    shape, layouts = parse_model_shape({**DENSE, "vocab_size": 64}), (ParallelConfig(), GenerationParallelConfig())
    [shard], [boxes] = split_engine(layouts[1], shape), table_boxes(layouts[1], shape)
    model = model_of(vllm_parameters(shape, shard) | {"lm_head.weight": torch.zeros(1)})
    embedding = model.get_parameter("model.embed_tokens.weight")
    model.get_submodule("lm_head").weight = nn.Parameter(embedding.data, requires_grad=False)
    record_metadata_for_reloading(model)
    ModelWriter(model, torch.float32, boxes, [plan(shape, *layouts, 2**20)])


def test_a_tensor_without_a_place_is_named() -> None:
    shape = parse_model_shape(DENSE)
    engine = [[box for box in table_boxes(GenerationParallelConfig(), shape)[0] if "k_proj.bias" not in box.tensor]]
    dtypes = ["float32"] * len(build_weight_map(shape))
    with pytest.raises(ValueError, match=r"no place for model.layers.0.self_attn.k_proj.bias, .*\(4 tensors\)"):
        plan_messages(shape, split_policy(ParallelConfig(), shape), engine, 1, dtypes, 2**20)


BLOCKED: dict[str, dict[str, Any]] = {
    "qwen2": DENSE | {"hidden_size": 320, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4},
    "qwen3_moe": SHAPES["qwen3_moe"]
    | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    | {"intermediate_size": 256, "moe_intermediate_size": 256},
    "deepseek_v3": LATENT
    | {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 128}
    | {"kv_lora_rank": 136, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
"""Models of few layers whose matrices have ragged last blocks where their ranks leave them."""
BLOCKED_LAYOUTS = {
    "tp2 to pp2": (ParallelConfig(tensor=2), GenerationParallelConfig(pipeline=2)),
    "pp2 to tp2": (ParallelConfig(pipeline=2), GenerationParallelConfig(tensor=2)),
}


@pytest.mark.parametrize("layouts", BLOCKED_LAYOUTS.values(), ids=BLOCKED_LAYOUTS)
@pytest.mark.parametrize("family", BLOCKED)
def test_matrices_in_fp8_come_with_the_scales_of_their_blocks(
    family: str, layouts: tuple[ParallelConfig, GenerationParallelConfig]
) -> None:
    """Numbers times scales, as a checkpoint in FP8 is read, are vLLM's parameters but for the rounding of E4M3."""
    shape, (training, generation) = parse_model_shape({**BLOCKED[family], "num_hidden_layers": 2}), layouts
    sources, engine = split_policy(training, shape), split_engine(generation, shape)
    assert list(find_cut_blocks(shape, training, generation)) == []
    dtypes, boxes = choose_wire_dtypes(shape, "float32", fp8_blocks=True), table_boxes(generation, shape)
    scheduled = plan_messages(shape, sources, boxes, 1, dtypes, 2**16)
    kinds, tensors = [getattr(torch, dtype) for dtype in dtypes], list_tensors(shape)
    for target, shard in enumerate(engine):
        expected = vllm_parameters(shape, shard)
        read = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        rounded = set()
        for message in split_messages(scheduled[scheduled["target"] == target]):
            laid, size = lay_out_pieces(message, kinds)
            buffer = torch.zeros(size, dtype=torch.uint8)
            for piece, parcel in zip(message, laid, strict=True):
                sent = sent_piece(piece, sources[piece["source"]], shape, tensors[piece["tensor"]])
                pack_piece(parcel, buffer, sent)
            for piece, parcel in zip(message, laid, strict=True):
                values = parcel.view_values(buffer).float()
                scales = parcel.view_scales(buffer)
                if scales is not None:
                    block_scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
                    values *= block_scales[: values.shape[0], : values.shape[1]]
                box = boxes[target][piece["box"]]
                read[box.parameter][to_slices(box.layout.locate(read_ranges(piece)))] = box.layout.compute(values)
                rounded |= {box.parameter} if scales is not None else set()
        assert {name for name in expected if "proj" in name and name.endswith("weight")} <= rounded
        for name, tensor in expected.items():
            if name not in rounded:
                assert torch.equal(read[name], tensor), name
            else:  # 3 bits of mantissa; below 2^-6 of what is scaled, steps of 2^-9
                step = tensor.abs().maximum(tensor.new_tensor(2.0**-6) * tensor.abs().max() / 448) * 2.0**-4
                assert (read[name] - tensor).abs().le(step * 1.0001).all(), name
                assert not torch.equal(read[name], tensor), name


def test_ranks_that_would_share_a_block_are_named() -> None:
    shape = parse_model_shape({**BLOCKED["qwen2"], "num_key_value_heads": 1, "intermediate_size": 384})
    layouts = ParallelConfig(tensor=2), GenerationParallelConfig(tensor=4)
    cuts = list(find_cut_blocks(shape, *layouts))
    assert "model.layers.0.mlp.gate_proj.weight on policy ranks: 0 to 192 of (384, 320)" in cuts
    assert "model.layers.0.mlp.down_proj.weight on engine ranks: 96 to 192 of (320, 384)" in cuts
    assert not any("q_proj" in cut for cut in cuts if "engine" in cut)


@pytest.mark.parametrize("config", [NANO, QWEN3_5_27B, LATENT], ids=["mamba", "delta nets", "selection bias"])
def test_exponents_and_biases_of_selection_travel_in_float32(config: dict[str, Any]) -> None:
    """A decay is an exponential of an exponential, and a bias decides between near ties; vLLM has both in float32."""
    shape = parse_model_shape(config)
    dtypes = choose_wire_dtypes(shape, "bfloat16", fp8_blocks=False)
    tensors = {
        tensor.name: dtype
        for entry, dtype in zip(build_weight_map(shape), dtypes, strict=True)
        for tensor in entry.hf
        if dtype == "float32"
    }
    precise = ("A_log", "e_score_correction_bias")
    names = {tensor.name for entry in build_weight_map(shape) for tensor in entry.hf}
    assert tensors.keys() == {name for name in names if name.endswith(precise)}
    assert tensors
