"""Traced loaders against the same loaders on tensors whose elements are their own numbers, and against a table."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.planning.engine_shards import split_engine
from megatron_grpo.planning.meta_engine import build_rank
from megatron_grpo.weight_sync.boxes import (
    Box,
    compute_digest,
    count_elements,
    find_overlap,
    pack_boxes,
    to_slices,
    unpack_boxes,
)
from megatron_grpo.weight_sync.weight_trace import trace_model, trace_weights
from tests.support.engine_configs import ENGINE_CONFIGS, write_engine_config
from tests.support.engine_table import FAMILIES, table_boxes

Loader = Callable[[dict[str, nn.Parameter], str, Tensor], None]


class Made(nn.Module):
    """A model of parameters of any sizes, with a loader for each tensor."""

    def __init__(self, sizes: dict[str, tuple[int, ...]], loader: Loader, device: str = "cpu") -> None:
        super().__init__()
        self.loader = loader
        for name, size in sizes.items():
            tensor = torch.full(size, -1.0, dtype=torch.float64, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loader(dict(self.named_parameters()), name, tensor)


def number_elements(sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors whose elements are all different, from 1 on."""
    begin, tensors = 1, {}
    for name, size in sizes.items():
        count = math.prod(size)
        tensors[name] = torch.arange(begin, begin + count, dtype=torch.float64).view(size)
        begin += count
    return tensors


def fill_parameters(
    boxes: Iterable[Box], tensors: dict[str, Tensor], sizes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Parameters as the boxes say, -1 elsewhere."""
    parameters = {name: torch.full(size, -1.0, dtype=torch.float64) for name, size in sizes.items()}
    for box in boxes:
        region = parameters[box.parameter][to_slices(box.layout.parameter)]
        if box.constant is None:
            region.copy_(box.layout.compute(tensors[box.tensor][to_slices(box.layout.tensor)]))
        else:
            region.fill_(box.constant)
    return parameters


def copy_transposed(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data[1, :, 2:5].copy_(tensor.t())


def copy_rotary(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    rows, columns = tensor.shape
    parameters["a"].data.copy_(tensor.view(2, rows // 4, 2, columns).transpose(1, 2).reshape(rows, columns))


def copy_interleaved(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data[:, ::2].copy_(tensor[:, :, 0])
    parameters["a"].data[:, 1::2].copy_(tensor[:, :, 1])


def copy_joined(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    gate, up = tensor.chunk(2, dim=-1)
    parameters["a"].data[:, :3].copy_(torch.cat([up, gate], dim=1)[:, 1:4])
    parameters["a"].data[:, 3:].copy_(torch.stack([gate[0], up[0]])[:, :1])


def copy_chosen(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data[:4].copy_(tensor[torch.tensor([5, 1, 2, 4])])
    parameters["a"].data[4:6].copy_(tensor.index_select(0, torch.tensor([0, 3])))
    parameters["a"].data[6:].copy_(tensor[torch.tensor([True, False, False, False, True, False])])


def copy_changed(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data.copy_(tensor)
    parameters["a"].data.copy_(-torch.exp(parameters["a"] / 100))


def copy_added(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data.copy_(tensor + 1.0)
    parameters["a"].data.mul_(0.5)


def repeat_scales(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data.copy_(tensor.repeat_interleave(3, dim=0).repeat_interleave(2, dim=1)[1:6])


def fill_rest(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters["a"].data[:2].copy_(tensor)
    parameters["a"].data[2:].fill_(3.0)
    tensor.zero_()
    parameters["b"].data.copy_(tensor)


CASES: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, ...], Loader]] = {
    "transposed": ({"a": (2, 4, 6)}, (3, 4), copy_transposed),
    "rotary": ({"a": (8, 3)}, (8, 3), copy_rotary),
    "interleaved": ({"a": (4, 6)}, (4, 3, 2), copy_interleaved),
    "joined": ({"a": (2, 4)}, (2, 6), copy_joined),
    "chosen": ({"a": (8, 2)}, (6, 2), copy_chosen),
    "changed": ({"a": (5,)}, (5,), copy_changed),
    "added": ({"a": (2, 3)}, (2, 3), copy_added),
    "repeated": ({"a": (5, 4)}, (2, 2), repeat_scales),
    "constants": ({"a": (4, 3), "b": (2, 3)}, (2, 3), fill_rest),
    "scalar": ({"a": (3, 1)}, (1,), lambda parameters, _, tensor: parameters["a"].data[1].copy_(tensor)),
    "heads": (
        {"a": (3, 2, 5)},
        (6, 5),
        lambda parameters, _, tensor: parameters["a"].data.copy_(tensor.view(2, 3, 5).transpose(0, 1)),
    ),
    "convolution": ({"a": (6, 1, 4)}, (8, 1, 4), lambda parameters, _, tensor: parameters["a"].data.copy_(tensor[1:7])),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", CASES)
def test_boxes_say_what_a_loader_does(case: str, device: str) -> None:
    sizes, size, loader = CASES[case]
    trace = trace_weights(Made(sizes, loader, device), {"t": (size, torch.float64)})
    assert trace.unexplained == {}
    assert unpack_boxes(pack_boxes(trace.boxes)) == trace.boxes
    model, tensors = Made(sizes, loader), number_elements({"t": size})
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    expected = {name: parameter.data for name, parameter in model.named_parameters()}
    actual = fill_parameters(trace.boxes, tensors, {name: tensor.shape for name, tensor in expected.items()})
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_a_part_of_a_box_is_located_in_the_parameter(case: str) -> None:
    """Elements written one by one are those of whole boxes."""
    sizes, size, loader = CASES[case]
    boxes = trace_weights(Made(sizes, loader), {"t": (size, torch.float64)}).boxes
    tensors, shapes = number_elements({"t": size}), {name: torch.Size(size) for name, size in sizes.items()}
    expected = fill_parameters(boxes, tensors, shapes)
    written = fill_parameters([box for box in boxes if not box.tensor], tensors, shapes)
    for box in boxes:
        rows = box.layout.tensor[0] if box.tensor else None
        for row in range(rows.begin, rows.end, rows.step) if rows is not None else ():
            part = (rows._replace(begin=row, end=row + 1), *box.layout.tensor[1:])
            region = written[box.parameter][to_slices(box.layout.locate(part))]
            region.copy_(box.layout.compute(tensors["t"][to_slices(part)]))
    torch.testing.assert_close(written, expected)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda parameters, _, tensor: parameters["a"].data.copy_(tensor @ tensor.T), "mm"),
        (lambda parameters, _, tensor: parameters["a"].data.copy_(tensor.cumsum(0)), "cumsum"),
        (lambda parameters, _, tensor: parameters["a"].data.add_(tensor), "add"),
        (lambda parameters, _, tensor: parameters["a"].data.copy_(tensor.to(torch.bfloat16)), "rounded"),
        (lambda parameters, _, tensor: parameters["a"].data.copy_(torch.empty_like(tensor).copy_(tensor)), "copy_"),
        (lambda parameters, _, tensor: parameters["a"].data.copy_(torch.zeros(4, 4)), "not those of a tensor"),
        (lambda parameters, _, tensor: parameters["a"].data.copy_(tensor.sort().values), "sort"),
    ],
)
def test_what_no_box_describes_is_named(loader: Loader, reason: str) -> None:
    trace = trace_weights(Made({"a": (4, 4), "b": (2,)}, loader), {"t": ((4, 4), torch.float64)})
    assert list(trace.unexplained) == ["a"]
    assert reason in trace.unexplained["a"]
    assert trace.describe_unexplained().startswith("a: ")


def test_nothing_is_written_to_a_model_that_serves() -> None:
    for sizes, size, loader in CASES.values():
        model = Made(sizes, loader)
        trace_weights(model, {"t": (size, torch.float64)})
        assert all((parameter == -1).all() for parameter in model.parameters())


LAYOUTS = {
    "tp1": GenerationParallelConfig(),
    "tp2": GenerationParallelConfig(tensor=2),
    "tp2 ep": GenerationParallelConfig(tensor=2, expert=2),
    "pp2": GenerationParallelConfig(pipeline=2),
    "tp2 pp2 ep": GenerationParallelConfig(tensor=2, pipeline=2, expert=2),
    "tp4": GenerationParallelConfig(tensor=4),
}
QUICK = ("tp2 pp2 ep", "tp4")
"""Layouts that are not slow; every family has a test in each of the others too, or a table."""
# Some of vLLM's models keep these parameters on every stage. Stages that do not compute with them are not in the table.
ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@pytest.mark.turns(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_traced_boxes_are_the_tables(family: str, layout: str, tmp_path: Path) -> None:
    from vllm.config import set_current_vllm_config

    write_engine_config(family, tmp_path)
    shape, parallel = read_model_shape(tmp_path), LAYOUTS[layout]
    if shape.experts is None and parallel.expert > 1:
        pytest.skip("a model without experts")
    sizes = measure_tensors(shape)
    for rank, table in enumerate(table_boxes(parallel, shape)):
        with build_rank(tmp_path, rank, parallel, "bfloat16") as (model, config):
            with set_current_vllm_config(config):
                trace = trace_model(model, sizes, torch.bfloat16)
            names = dict(model.named_parameters())
        assert trace.unexplained == {}
        boxes = set(trace.boxes)
        assert set(table) <= boxes
        assert {box.parameter for box in boxes - set(table)} <= set(ENDS)
        shard = split_engine(parallel, shape)[rank]
        assert not (shard.has_embedding and shard.has_output) or boxes == set(table)
        # Each parameter is filled, padding with zeros.
        counts = dict.fromkeys(names, 0)
        for box in trace.boxes:
            counts[box.parameter] += count_elements(box.layout.parameter)
            assert box.tensor or box.constant == 0.0
        assert counts == {name: parameter.numel() for name, parameter in names.items()}
        assert compute_digest(pack_boxes(trace.boxes)) == compute_digest(pack_boxes(list(trace.boxes)))


def test_a_model_without_storage_leaves_the_class_of_transformers_as_it_is(tmp_path: Path) -> None:
    """Else vLLM makes it its own, and this process could not build transformers' model any more."""
    from transformers import Olmo3Model

    before = Olmo3Model.__bases__, dict(vars(Olmo3Model))
    write_engine_config("olmo3", tmp_path)
    with build_rank(tmp_path, 0, GenerationParallelConfig(), "bfloat16") as (model, _):
        assert any(isinstance(module, Olmo3Model) for module in model.modules())
    bases, attributes = before
    assert Olmo3Model.__bases__ == bases
    assert all(vars(Olmo3Model)[name] is value for name, value in attributes.items())


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if layout in QUICK else pytest.mark.slow)
        for family in ENGINE_CONFIGS
        for layout in (QUICK if family in FAMILIES else LAYOUTS)
    ],
)
def test_loaded_numbers_are_where_the_boxes_say(family: str, layout: str, tmp_path: Path) -> None:
    """vLLM's loaders run for real on tensors whose elements are their own numbers."""
    if family.startswith("qwen3_5") or family.endswith("_vision"):
        pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    from vllm.config import set_current_vllm_config

    write_engine_config(family, tmp_path)
    shape, parallel = read_model_shape(tmp_path), LAYOUTS[layout]
    if shape.experts is None and parallel.expert > 1:
        parallel = GenerationParallelConfig(tensor=2, pipeline=2)
    sizes = measure_tensors(shape)
    tensors = {
        name: tensor / 1e4 if name.endswith("A_log") else tensor for name, tensor in number_elements(sizes).items()
    }
    for rank in {0, parallel.ranks_per_engine - 1}:
        with build_rank(tmp_path, rank, parallel, "bfloat16") as (model, config), set_current_vllm_config(config):
            trace = trace_model(model, sizes, torch.bfloat16)
            materialize(model)
            with torch.no_grad():
                model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
            buffers = {
                name: buffer for name, buffer in model.named_buffers() if name in {box.parameter for box in trace.boxes}
            }
            actual = {name: tensor.data for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}
        assert trace.unexplained == {}
        expected = fill_parameters(trace.boxes, tensors, {name: tensor.shape for name, tensor in actual.items()})
        torch.testing.assert_close({name: actual[name] for name in expected}, expected, rtol=1e-6, atol=0)
        assert all((tensor != -1).all() for tensor in actual.values())


def materialize(model: Any) -> None:
    """Give a model without storage parameters and buffers in float64, whose elements are -1."""
    memo: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.full(buffer.shape, -1.0, dtype=torch.float64)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in memo:
                values = torch.full(parameter.shape, -1.0, dtype=torch.float64)
                values.__class__, values.__dict__ = parameter.__class__, parameter.__dict__.copy()
                memo[id(parameter)] = values
            module._parameters[name] = memo[id(parameter)]


def test_the_common_part_of_boxes_in_steps() -> None:
    from megatron_grpo.weight_sync.boxes import Range

    for begin in range(4):
        for step in (1, 2, 3):
            for low in range(12):
                for high in range(low, 13):
                    part = Range(begin, begin + 3 * step + 1, step)
                    expected = [index for index in range(*part) if low <= index < high]
                    common = find_overlap((part,), (Range(low, high),))
                    assert (list(range(*common[0])) if common else []) == expected
                    assert common is None or common[0].size == len(expected)
