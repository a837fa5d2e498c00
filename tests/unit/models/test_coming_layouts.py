"""Layouts of released models that the package does not train yet, against reshapes of transformers' modelling code."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_grpo.models import megatron_names
from megatron_grpo.models.families import FAMILIES, llama4
from megatron_grpo.models.families.qwen3_5 import DELTA, DELTA_BY_KEY_HEAD, DELTA_REST, EXPERTS, GATED_ATTENTION
from megatron_grpo.models.hf_weights import join_shards, merge_slices
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, iter_entries, list_experts, map_rows
from tests.support.coming_layouts import KERNEL, KEY_DIM, PER_KEY, SHAPE, VALUE_DIM
from tests.support.hf_configs import read_configs

LAYER, EXPERT = 1, 2
K, V, NV = 4 * KEY_DIM, 4 * PER_KEY * VALUE_DIM, 4 * PER_KEY
H, FFN, D, GROUPS, HEADS, COUNT = 6, 8, 3, 4, 8, 4
"""Sizes that the oracles below write out, instead of reading them from the table."""

PHI = "\n".join(FAMILIES["phi3"].tables)
GPT_OSS = "\n".join(FAMILIES["gpt_oss"].tables)
ROWS_OF_QWEN3_NEXT = tuple(row for table in FAMILIES["qwen3_next"].tables for row in map_rows(table))
Tensors = dict[str, Tensor]
Oracle = Callable[[Tensors, int], list[Tensor]]
"""From a layer's tensors, by the last parts of their names, to the parameter of each tensor-parallel rank."""


def number_elements(shape: tuple[int, ...]) -> Tensor:
    """A tensor in which every element is another number."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def cut_sections(sections: list[Tensor], size: int) -> list[Tensor]:
    """Cut each section in equal parts; a rank has its part of every section."""
    return [torch.cat(parts) for parts in zip(*(section.chunk(size) for section in sections), strict=True)]


def cut_columns(matrix: Tensor, size: int) -> list[Tensor]:
    return list(matrix.chunk(size, dim=1))


def gated_qkv(tensors: Tensors, size: int) -> list[Tensor]:
    """Qwen3NextAttention.forward: `torch.chunk(q_proj(...).view(..., -1, head_dim * 2), 2, dim=-1)`."""
    query, gate = tensors["q_proj.weight"].view(HEADS, D * 2, H).chunk(2, dim=1)  # by head
    groups = []
    for group in range(GROUPS):
        heads = slice(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
        rows = slice(group * D, (group + 1) * D)
        keys_and_values = tensors["k_proj.weight"][rows], tensors["v_proj.weight"][rows]
        groups.append(torch.cat([query[heads].flatten(0, 1), gate[heads].flatten(0, 1), *keys_and_values]))
    return list(torch.cat(groups).chunk(size))


def phi_qkv(tensors: Tensors, size: int) -> list[Tensor]:
    """Phi3Attention.forward: queries, then keys, then values."""
    qkv, position = tensors["qkv_proj.weight"], HEADS * D
    query, key, value = qkv[:position], qkv[position : position + GROUPS * D], qkv[position + GROUPS * D :]
    per_group = HEADS // GROUPS * D
    groups = [
        torch.cat([query[n * per_group : (n + 1) * per_group], key[n * D : (n + 1) * D], value[n * D : (n + 1) * D]])
        for n in range(GROUPS)
    ]
    return list(torch.cat(groups).chunk(size))


def qwen3_next_in_proj(tensors: Tensors, size: int) -> list[Tensor]:
    """transformers' own reordering, applied to the columns of the transposed matrices."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes: Any = SimpleNamespace(num_k_heads=4, num_v_heads=NV, head_k_dim=KEY_DIM, head_v_dim=VALUE_DIM)
    mixed = [tensors[f"in_proj_{name}.weight"].T[None] for name in ("qkvz", "ba")]
    sections = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(sizes, *mixed)
    return cut_sections([section[0].flatten(1).T for section in sections], size)


def qwen3_5_in_proj(tensors: Tensors, size: int) -> list[Tensor]:
    """Qwen3_5GatedDeltaNet.forward: `torch.split(mixed_qkv, [key_dim, key_dim, value_dim])`; z, b and a are apart."""
    sections = list(tensors["in_proj_qkv.weight"].split([K, K, V]))
    return cut_sections(sections + [tensors[f"in_proj_{name}.weight"] for name in "zba"], size)


def conv1d(tensors: Tensors, size: int) -> list[Tensor]:
    return cut_sections(list(tensors["conv1d.weight"].split([K, K, V])), size)


ROWS: dict[str, tuple[str, str, Oracle]] = {
    "gated attention": (GATED_ATTENTION, "linear_qkv.weight", gated_qkv),
    "phi qkv": (PHI, "linear_qkv.weight", phi_qkv),
    "phi gate and up": (
        PHI,
        "linear_fc1.weight",
        lambda tensors, size: cut_sections(list(tensors["gate_up_proj.weight"].chunk(2, dim=0)), size),
    ),
    "qwen3_next in_proj": (DELTA_BY_KEY_HEAD, "in_proj.weight", qwen3_next_in_proj),
    "qwen3_5 in_proj": (DELTA, "in_proj.weight", qwen3_5_in_proj),
    "conv1d": (DELTA_REST, "conv1d.weight", conv1d),
    "dt_bias": (DELTA_REST, "dt_bias", lambda tensors, size: list(tensors["dt_bias"].chunk(size))),
    "out_norm": (DELTA_REST, "out_norm.weight", lambda tensors, size: [tensors["norm.weight"]] * size),
    "out_proj": (DELTA_REST, "out_proj.weight", lambda tensors, size: cut_columns(tensors["out_proj.weight"], size)),
    "qwen3_5 gate and up": (
        EXPERTS,
        "{expert}.linear_fc1.weight",
        lambda tensors, size: cut_sections(list(tensors["gate_up_proj"][EXPERT].chunk(2, dim=0)), size),
    ),
    "qwen3_5 down": (
        EXPERTS,
        "{expert}.linear_fc2.weight",
        lambda tensors, size: cut_columns(tensors["down_proj"][EXPERT], size),
    ),
    "shared gate": (EXPERTS, "gate_weight", lambda tensors, size: [tensors["shared_expert_gate.weight"]] * size),
    "llama4 gate and up": (
        llama4.EXPERTS,
        "{expert}.linear_fc1.weight",
        lambda tensors, size: cut_sections([part.T for part in tensors["gate_up_proj"][EXPERT].chunk(2, dim=-1)], size),
    ),
    "llama4 down": (
        llama4.EXPERTS,
        "{expert}.linear_fc2.weight",
        lambda tensors, size: cut_columns(tensors["down_proj"][EXPERT].T, size),
    ),
    "gpt_oss gate and up": (
        GPT_OSS,
        "linear_fc1.weight",
        lambda tensors, size: cut_sections(
            [tensors["gate_up_proj"][EXPERT][..., ::2].T, tensors["gate_up_proj"][EXPERT][..., 1::2].T], size
        ),
    ),
    "gpt_oss biases of gate and up": (
        GPT_OSS,
        "linear_fc1.bias",
        lambda tensors, size: cut_sections(
            [tensors["gate_up_proj_bias"][EXPERT][::2], tensors["gate_up_proj_bias"][EXPERT][1::2]], size
        ),
    ),
    "gpt_oss down": (
        GPT_OSS,
        "linear_fc2.weight",
        lambda tensors, size: cut_columns(tensors["down_proj"][EXPERT].T, size),
    ),
    "gpt_oss bias of down": (
        GPT_OSS,
        "linear_fc2.bias",
        lambda tensors, size: [tensors["down_proj_bias"][EXPERT]] * size,
    ),
    "sinks": (GPT_OSS, "softmax_offset", lambda tensors, size: list(tensors["sinks"].chunk(size))),
}


def find_row(table: str, ending: str) -> WeightEntry:
    return next(row for row in map_rows(table) if row.name.endswith(ending))


def make_tensors(row: WeightEntry) -> Tensors:
    """The Hugging Face tensors of a row, whose elements all differ, by their full names."""
    tensors, begin = Tensors(), 0.0
    for name, tensor in zip(row.name_tensors(LAYER, EXPERT), row.hf, strict=True):
        tensors[name] = number_elements(tensor.measure(SHAPE.sizes)) + begin
        begin += tensors[name].numel()
    return tensors


def import_row(row: WeightEntry, tensors: Tensors, rank: int, size: int, expert: int = EXPERT) -> Tensor:
    parts = [tensors[part.name][part.region] for part in row.list_slices(SHAPE, LAYER, rank, size, expert)]
    return merge_slices(row, parts, SHAPE, len(parts[0]))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_ranks_get_the_rows_that_transformers_reads_and_give_them_back(name: str, size: int) -> None:
    table, ending, oracle = ROWS[name]
    row = find_row(table, ending)
    tensors = make_tensors(row)
    expected = oracle({re.search(r"\w+(\.weight)?$", name)[0]: value for name, value in tensors.items()}, size)  # type: ignore[index]
    experts = range(COUNT) if row.is_stacked else [EXPERT]
    joined = Tensors()
    for expert in experts:
        shards = [import_row(row, tensors, rank, size, expert) for rank in range(size)]
        if expert == EXPERT:
            for shard, rank_expected in zip(shards, expected, strict=True):
                assert torch.equal(shard, rank_expected)
        join_shards(row, LAYER, shards, SHAPE, expert, joined)
    assert joined.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        assert torch.equal(joined[tensor_name], tensor)


@pytest.mark.parametrize("size", [8, 16])
def test_ranks_that_share_a_group_of_phis_one_matrix_have_even_parts_of_it(size: int) -> None:
    row = find_row(PHI, "linear_qkv.weight")
    tensors = make_tensors(row)
    qkv = phi_qkv({"qkv_proj.weight": next(iter(tensors.values()))}, 1)[0]
    shards = [import_row(row, tensors, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(shards), qkv)
    assert {len(shard) for shard in shards} == {len(qkv) // size}
    assert torch.equal(join_shards(row, LAYER, shards, SHAPE)[row.name_tensors(LAYER)[0]], next(iter(tensors.values())))


def test_ranks_cannot_share_a_group_of_gated_heads() -> None:
    with pytest.raises(AssertionError, match="8 ranks cannot share 4 groups"):
        find_row(GATED_ATTENTION, "linear_qkv.weight").list_slices(SHAPE, LAYER, 0, 8)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe"])
def test_an_imported_expert_computes_what_transformers_computes(family: str) -> None:
    """The module of transformers as a function: its own layout never appears here."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

    torch.manual_seed(1)
    sizes = {"hidden_size": H, "moe_intermediate_size": FFN, "intermediate_size": FFN}
    module: Any
    if family == "gpt_oss":
        table, module = GPT_OSS, GptOssExperts(GptOssConfig(**sizes, num_local_experts=COUNT))
    else:
        table, module = EXPERTS, Qwen3_5MoeExperts(Qwen3_5MoeTextConfig(**sizes, num_experts=COUNT))
    for parameter in module.parameters():
        parameter.data.normal_()
    prefix = f"model.layers.{LAYER}.mlp.experts."
    tensors = {prefix + name: parameter.data for name, parameter in module.named_parameters()}
    fc1, fc2 = (
        [import_row(find_row(table, f"experts.{{expert}}.linear_fc{n}.{kind}"), tensors, 0, 1) for kind in kinds]
        for n, kinds in ((1, KINDS[family]), (2, KINDS[family]))
    )
    hidden = torch.randn(5, H)
    gate, up = functional.linear(hidden, *fc1).chunk(2, dim=-1)
    if family == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        gate = gate * torch.sigmoid(1.702 * gate)
    else:
        gate = functional.silu(gate)
    expected = module(hidden, torch.full((5, 1), EXPERT), torch.ones(5, 1))
    torch.testing.assert_close(functional.linear(gate * up, *fc2), expected.detach(), atol=1e-5, rtol=1e-5)


KINDS = {"gpt_oss": ("weight", "bias"), "qwen3_5_moe": ("weight",)}


def test_layers_have_the_rows_of_their_kinds() -> None:
    by_layer: dict[int, set[str]] = {0: set(), 1: set()}
    for row, layer, _ in iter_entries(ROWS_OF_QWEN3_NEXT, SHAPE, [0, 1]):
        by_layer[layer].add(row.name.rpartition(".")[0] or row.name)
    assert "self_attention.conv1d" in by_layer[0] - by_layer[1]
    assert {"self_attention.linear_qkv", "self_attention.q_layernorm"} <= by_layer[1] - by_layer[0]
    assert {"input_layernorm", "pre_mlp_layernorm", "mlp.router"} <= by_layer[0] & by_layer[1]


def test_a_tensor_of_all_experts_is_listed_once() -> None:
    row = find_row(EXPERTS, "{expert}.linear_fc1.weight")
    assert [*list_experts(row, SHAPE)] == [0]
    assert row.hf[0].measure(SHAPE.sizes) == (COUNT, 2 * FFN, H)
    assert HFTensor("conv1d.weight", ("hidden", "channel", "kernel")).measure(SHAPE.sizes) == (H, 1, KERNEL)


def test_no_row_of_a_family_has_an_axis_twice() -> None:
    """Sections are told apart by the names of their factors."""
    for family in FAMILIES:
        for row in (row for table in FAMILIES[family].tables for row in map_rows(table)):
            assert len(set(row.axes)) == len(row.axes), row.name


def test_no_other_file_knows_names_and_numbers_of_layers() -> None:
    pattern = re.compile(
        r"decoder\.layers|final_layernorm|layer_number\s*[-+<>]|[-+<>]=?\s*[\w.]*layer_number\b|layer_norm_weight"
    )
    package = Path(megatron_names.__file__).parents[1]
    files = [file for file in package.rglob("*.py") if file != Path(megatron_names.__file__)]
    assert len(files) > 100
    assert [file.name for file in files if pattern.search(file.read_text())] == ["stand_in_layers.py"]
    # The stand-in for a module of Transformer Engine has its parameter under the module's name.


def test_the_names_of_hybrid_stacks_are_two_constants_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of names that was tried with HybridModel: a mixer is layer 2i, its feed-forward network 2i + 1."""
    monkeypatch.setattr(megatron_names, "HALVES", (("mixer",), ("mlp",)))
    monkeypatch.setattr(megatron_names, "FINAL_NORM", "final_norm")
    expected = read_configs("hybrid_names")
    visited_names = set()
    for row, layer, local in iter_entries(ROWS_OF_QWEN3_NEXT, SHAPE, [0, 1]):
        assert layer == local, "of the first stage"
        for tensor in row.hf:
            name = tensor.name.removeprefix("model.layers.{layer}.")
            parameter_name = expected[name].replace("{mixer}", str(2 * layer)).replace("{mlp}", str(2 * layer + 1))
            assert megatron_names.name_parameter(layer, row.half, row.name)[0] == parameter_name
            visited_names.add(name)
    assert visited_names == expected.keys()
    assert megatron_names.name_parameter(0, None, "final_norm.weight") == ("decoder.final_norm.weight",)
    # Layer 4 of Megatron-Core, counted from 1, is the feed-forward network of layer 1.
    assert [megatron_names.translate_layer(number) for number in (1, 2, 3, 4)] == [
        (0, ("mixer",)),
        (0, ("mlp",)),
        (1, ("mixer",)),
        (1, ("mlp",)),
    ]
    assert megatron_names.list_by_megatron_layer([True, False], "mixer") == [1, 0, 0, 0]
    assert megatron_names.list_by_megatron_layer([True, False], "mlp") == [0, 1, 0, 0]
    assert megatron_names.count_megatron_layers(3) == 6
