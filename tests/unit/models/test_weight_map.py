"""The weight map against definitions written out head by head, and what it says about damaged folders."""

import inspect
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.hf_folder import HFFolderReader, write_hf_folder
from megatron_grpo.models.hf_weights import bind_entries, merge_slices, split_parameter
from megatron_grpo.models.megatron_names import name_parameter
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice, iter_entries, pad_vocab
from tests.support.coming_layouts import SIZES

SHAPE = ModelShape(**SIZES, family="qwen2", layers=4, ffn_hidden=10, qkv_bias=True, qk_norm=False)


def entry(name: str, shape: ModelShape = SHAPE) -> WeightEntry:
    return next(e for e in build_weight_map(shape) if name in e.name)


def full_tensors(of: WeightEntry) -> list[Tensor]:
    return [torch.randn(tensor.measure(SHAPE.sizes)) for tensor in of.hf]


def cut(full: Tensor, part: WeightSlice) -> Tensor:
    return full[part.region]


def local(of: WeightEntry, full: list[Tensor], rank: int, size: int, rows: int = 0) -> Tensor:
    slices = of.list_slices(SHAPE, 0, rank, size)
    return merge_slices(of, [cut(t, s) for t, s in zip(full, slices, strict=True)], SHAPE, rows)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["linear_qkv.weight", "linear_qkv.bias"])
def test_qkv_is_interleaved_by_group(name: str, size: int) -> None:
    of = entry(name)
    query, key, value = full = full_tensors(of)
    d, per_group = SHAPE.head_dim, SHAPE.attention_heads // SHAPE.key_value_heads
    for rank in range(size):
        groups = range(rank * SHAPE.key_value_heads // size, (rank + 1) * SHAPE.key_value_heads // size)
        rows = []
        for group in groups:
            heads = range(group * per_group, (group + 1) * per_group)
            rows += [query[head * d : (head + 1) * d] for head in heads]
            rows += [key[group * d : (group + 1) * d], value[group * d : (group + 1) * d]]
        assert torch.equal(local(of, full, rank, size), torch.cat(rows))


@pytest.mark.parametrize("size", [8, 16])
def test_ranks_that_share_a_group_have_even_parts_of_its_rows(size: int) -> None:
    """4 groups of 12 rows: two queries, a key and a value of 3 rows each."""
    of = entry("linear_qkv.weight")
    full = full_tensors(of)
    parameter = local(of, full, 0, 1)
    parts = [local(of, full, rank, size) for rank in range(size)]
    assert {len(part) for part in parts} == {len(parameter) // size}
    assert torch.equal(torch.cat(parts), parameter)
    split = [split_parameter(of, part, of.list_slices(SHAPE, 0, rank, size), SHAPE) for rank, part in enumerate(parts)]
    for position, tensor in enumerate(full):
        assert torch.equal(torch.cat([tensors[position] for tensors in split]), tensor)


def test_gate_rows_of_a_rank_come_before_its_up_rows() -> None:
    of = entry("linear_fc1.weight")
    gate, up = full = full_tensors(of)
    assert torch.equal(local(of, full, 1, 2), torch.cat([gate[5:], up[5:]]))


def test_vocabulary_is_padded_with_zeros_on_the_last_ranks() -> None:
    of = entry("output_layer.weight")
    full = full_tensors(of)
    size = 5
    rows = pad_vocab(SHAPE, size) // size
    assert rows == 3
    shards = [local(of, full, rank, size, rows) for rank in range(size)]
    assert torch.equal(torch.cat(shards)[:13], full[0])
    assert torch.equal(torch.cat(shards)[13:], torch.zeros(2, SHAPE.hidden))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3"])
def test_splitting_undoes_merging_and_slices_cover_each_tensor_once(family: str, size: int) -> None:
    shape = replace(SHAPE, family=family, ffn_hidden=12)
    for of in build_weight_map(shape):
        full = [torch.randn(tensor.measure(shape.sizes)) for tensor in of.hf]
        collected: list[list[Tensor]] = [[] for _ in full]
        for rank in range(size):
            slices = of.list_slices(shape, 0, rank, size)
            parts = [cut(t, s) for t, s in zip(full, slices, strict=True)]
            assert [s.local_shape for s in slices] == [tuple(p.shape) for p in parts]
            merged = merge_slices(of, parts, shape, rows=pad_vocab(shape, size) // size)
            for index, part in enumerate(split_parameter(of, merged, slices, shape)):
                assert torch.equal(part, parts[index])
                collected[index].append(part)
        if of.axis is not None:
            for pieces, tensor in zip(collected, full, strict=True):
                assert torch.equal(torch.cat(pieces, dim=of.axis), tensor)


def test_stage_numbers_its_layers_from_its_own_first() -> None:
    entries = list(iter_entries(build_weight_map(SHAPE), SHAPE, [2, 3]))
    per_layer = [(layer, position) for e, layer, position in entries if e.half is not None]
    assert per_layer == sorted(per_layer)
    assert set(per_layer) == {(2, 0), (3, 1)}
    assert len(entries) == len({(e.name, layer) for e, layer, _ in entries})


def test_tied_embeddings_are_loaded_twice_and_exported_once() -> None:
    tied = build_weight_map(replace(SHAPE, tied_embeddings=True))
    assert [e.copy for e in tied if e.hf[0].name == "model.embed_tokens.weight"] == [False, True]
    assert not any(e.hf[0].name == "lm_head.weight" for e in tied)


WANTED = WeightSlice("w", (4, 6), ((1, 3), (0, 6)))


def test_reader_reads_only_the_slice(tmp_path: Path) -> None:
    full = torch.randn(4, 6)
    save_file({"w": full}, tmp_path / "model.safetensors")
    reader = HFFolderReader(tmp_path)
    assert torch.equal(reader.read(WANTED), full[1:3])
    assert torch.equal(reader.read(WeightSlice("w", (4, 6), ((0, 4), (4, 6)))), full[:, 4:])
    assert torch.equal(reader.read(WeightSlice("w", (4, 6), ((0, 4), (0, 6)))), full)


def test_reader_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        HFFolderReader(tmp_path)
    single = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4, 5)}, single)
    with pytest.raises(ValueError, match=r"w has shape \[4, 5\], but config.json implies \[4, 6\]"):
        HFFolderReader(tmp_path).read(WANTED)
    with pytest.raises(ValueError, match="has no tensor other"):
        HFFolderReader(tmp_path).read(replace(WANTED, name="other"))
    single.write_bytes(single.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        HFFolderReader(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(ValueError, match="not a safetensors index"):
        HFFolderReader(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match=r"00002\.safetensors does not exist"):
        HFFolderReader(tmp_path).read(WANTED)


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")

    def broken():  # type: ignore[no-untyped-def]
        yield "w", torch.zeros(3)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write_hf_folder(broken(), tmp_path / "source", tmp_path / "out", max_file_bytes=1)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    with pytest.raises(ValueError, match="already exists"):
        write_hf_folder([], tmp_path / "source", tmp_path / "source")


def test_a_tensor_with_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, math.nan])}, tmp_path / "model.safetensors")
    reader = HFFolderReader(tmp_path)
    slices = {name: WeightSlice(name, (2,), ((0, 2),)) for name in "ab"}
    assert reader.read(slices["a"]).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"model.safetensors: b has values that are not finite"):
        reader.read(slices["b"])


class Stage(torch.nn.Module):
    """The parameters outside layers of a pipeline stage without layers, and an embedding unless it is not the first."""

    def __init__(self, *, first: bool, tied: bool, norm: str = "weight") -> None:
        super().__init__()
        self.pre_process, self.post_process = first, True
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()
        self.decoder.final_layernorm = torch.nn.Module()
        self.decoder.final_layernorm.register_parameter(norm, torch.nn.Parameter(torch.ones(6)))
        if first:
            self.embedding = torch.nn.ModuleDict({"word_embeddings": torch.nn.Embedding(13, 6)})
        if not (first and tied):
            self.output_layer = torch.nn.Linear(6, 13, bias=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_stage_binds_its_parameters_outside_layers(first: bool, tied: bool) -> None:
    stage = Stage(first=first, tied=tied)
    bound = bind_entries([stage], replace(SHAPE, tied_embeddings=tied))
    assert {id(binding.parameter) for binding in bound} == {id(parameter) for parameter in stage.parameters()}


def test_a_whole_model_must_have_every_parameter_outside_layers() -> None:
    with pytest.raises(AssertionError, match=r"^the model has no parameter \['decoder.final_layernorm.weight'\]"):
        bind_entries([Stage(first=True, tied=False, norm="scale")], SHAPE)


ADAPTED = [f"decoder.layers.0.{name}" for name in ("self_attention.linear_qkv", "mlp.linear_fc2")]


def whole_model(adapted: list[str]) -> torch.nn.Module:
    """A module with every parameter of the weight map for one layer, and adapters at the layers of these names."""
    model: Any = torch.nn.Module()
    model.pre_process = model.post_process = True
    names = [name_parameter(0, row.half, row.name)[0] for row in build_weight_map(SHAPE) if not row.copy]
    for name in [*names, *(f"{layer}.{part}" for layer in adapted for part in ("lora_a", "lora_b"))]:
        module = model
        for part in name.split(".")[:-1]:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(torch.ones(2)))
        module.adapters = [module]
    layer: Any = model.decoder.layers.get_submodule("0")
    layer.layer_number = 1
    model.decoder.layers = torch.nn.ModuleList([layer])
    return model


def look_up_statically(protocol: type, value: object) -> bool:
    """isinstance() of a runtime-checkable protocol since Python 3.12."""
    members = [name for name in vars(protocol) if not name.startswith("_")] + list(protocol.__annotations__)
    return all(inspect.getattr_static(value, name, None) is not None for name in members)


def test_adapters_are_bound_though_their_parameters_are_not_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(Protocol), "__instancecheck__", look_up_statically)
    model = whole_model(ADAPTED)
    bindings = [bound for bound in bind_entries([model], replace(SHAPE, layers=1)) if bound.adapted is not None]
    assert [bound.adapted for bound in bindings] == [model.get_submodule(name) for name in ADAPTED]
    assert all(
        bound.parameter is model.get_submodule(name).weight for bound, name in zip(bindings, ADAPTED, strict=True)
    )


def test_an_adapter_that_no_entry_takes_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"does not know \['decoder\.layers\.0\.extra\.lora_a'\]$"):
        bind_entries([whole_model([*ADAPTED, "decoder.layers.0.extra"])], replace(SHAPE, layers=1))
