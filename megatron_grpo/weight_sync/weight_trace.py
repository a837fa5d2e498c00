"""Traces vLLM's loaders: finds which box of which Hugging Face tensor lands in which box of a parameter.

`load_weights` runs on tensors without storage, and nothing is written to the model, which may serve. A view of a tensor
shares its storage, and has an offset and strides. So views need no bookkeeping: when a loader copies, the storages tell
which tensor and which parameter meet, and offsets and strides tell where. Only operations that make a new storage are
recorded, and followed back when their result is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.weight_sync.boxes import Box, BoxLayout, Function, FunctionName, Range, find_overlap
from megatron_grpo.weight_sync.engine_layers import RebuiltLayer, is_derived

_COPIES = {"clone", "contiguous", "_to_copy", "lift_fresh"}


class _UnexplainedError(Exception):
    """No list of boxes describes an assignment; the text says why."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """Contents of a storage: a parameter, a tensor, or the result of an operation."""

    full: Tensor  # kept, so that no other storage gets its address
    parameter: str = ""
    tensor: str = ""
    operation: str = ""
    arguments: tuple[Any, ...] = ()


class _Loop(NamedTuple):
    """A loop of an assignment, with the distance of its steps on both sides."""

    rounds: int
    target: int  # in elements of the parameter
    source: int


_TARGET, _SOURCE = 1, 2  # fields of `_Loop`


class _Assignment(NamedTuple):
    """A nest of loops that assigns elements of a source to a parameter."""

    loops: tuple[_Loop, ...]
    offsets: tuple[int, int, int]  # (0, in the parameter, in the source), as in `_Loop`
    functions: tuple[Function, ...] = ()

    @staticmethod
    def describe_copy(target: Tensor, source: Tensor) -> _Assignment:
        """Describe a copy between two views; loops that run on are joined."""
        loops: list[_Loop] = []
        for loop in map(_Loop, target.shape, target.stride(), source.expand(target.shape).stride()):
            outer = loops[-1] if loops else _Loop(0, 0, 0)
            if (outer.target, outer.source) == (loop.rounds * loop.target, loop.rounds * loop.source) and loops:
                loops[-1] = _Loop(outer.rounds * loop.rounds, loop.target, loop.source)
            elif loop.rounds != 1:
                loops.append(loop)
        return _Assignment(tuple(loops), (0, int(target.storage_offset()), int(source.storage_offset())))

    def align(self, side: int, full: Tensor) -> Iterator[tuple[_Assignment, list[int], list[int]]]:
        """Split loops until each runs along one dimension of a side's full tensor.

        Yields parts of the assignment, the dimension of each loop (-1: none), and the indices of its first element.
        """
        sizes, strides, offset = full.shape, full.stride(), self.offsets[side] - int(full.storage_offset())
        axes = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: -strides[axis])
        begin = [0] * len(sizes)
        for axis in axes:
            begin[axis], offset = divmod(offset, strides[axis])
        loops = tuple(loop for loop in self.loops if loop.rounds > 1)
        loop_axes: list[int] = []
        for number, loop in enumerate(loops):
            stride = loop[side]
            axis = next((axis for axis in axes if strides[axis] <= stride and stride % strides[axis] == 0), -1)
            step = stride // strides[axis] if axis >= 0 else 0
            if axis < 0 and stride:
                raise _UnexplainedError("the elements of a view form no boxes")
            if axis < 0 or begin[axis] + (loop.rounds - 1) * step < sizes[axis]:
                loop_axes.append(axis)
                continue
            inner = sizes[axis] // step
            if inner > 1 and begin[axis] < step and sizes[axis] % step == 0 and loop.rounds % inner == 0:
                outer_loop = _Loop(loop.rounds // inner, loop.target * inner, loop.source * inner)
                split = (*loops[:number], outer_loop, loop._replace(rounds=inner), *loops[number + 1 :])
                parts = iter([self._replace(loops=split)])
            else:  # it begins inside a row
                parts = self._replace(loops=loops).unroll(number)
            for part in parts:
                yield from part.align(side, full)
            return
        yield self._replace(loops=loops), loop_axes, begin

    def unroll(self, number: int) -> Iterator[_Assignment]:
        """Yield an assignment for each round of a loop."""
        loop, loops = self.loops[number], self.loops[:number] + self.loops[number + 1 :]
        for step in range(loop.rounds):
            target, source = self.offsets[_TARGET] + step * loop.target, self.offsets[_SOURCE] + step * loop.source
            yield self._replace(loops=loops, offsets=(0, target, source))

    def find_cuts(self, parameter: Tensor, tensor: Tensor) -> Iterator[BoxLayout]:
        """Describe an assignment by boxes of both sides' full tensors."""
        for target_nest, _, _ in self.align(_TARGET, parameter):
            for nest, axes, begin in target_nest.align(_SOURCE, tensor):
                ((nest, target_axes, target_begin),) = nest.align(_TARGET, parameter)
                pairs = list(zip(target_axes, axes, strict=True))
                for number, (target_axis, axis) in enumerate(pairs):
                    if target_axis in target_axes[number + 1 :] or (axis >= 0 and axis in axes[number + 1 :]):
                        for part in nest.unroll(number):  # two loops run along one dimension
                            yield from part.find_cuts(parameter, tensor)
                        break
                else:
                    source, target = (
                        [Range(index, index + 1) for index in indices] for indices in (begin, target_begin)
                    )
                    order = [-1] * len(target)
                    for loop, (target_axis, axis) in zip(nest.loops, pairs, strict=True):
                        target[target_axis] = _find_span(target_begin, target_axis, loop, _TARGET, parameter)
                        if axis >= 0:
                            source[axis] = _find_span(begin, axis, loop, _SOURCE, tensor)
                            order[target_axis] = axis
                    yield BoxLayout(tuple(source), tuple(target), tuple(order), self.functions)

    def follow(self, result: Tensor, parts: Sequence[Tensor], dim: int = 0) -> Iterator[tuple[_Assignment, Tensor]]:
        """Replace a result, which is the source, by the tensors that it joins."""
        for nest, axes, begin in self.align(_SOURCE, result):
            along = [number for number, axis in enumerate(axes) if axis == dim]
            steps = [nest.loops[number].source // result.stride(dim) for number in along]
            if len(parts) > 1 and steps not in ([], [1]):
                raise _UnexplainedError("a view of a concatenation runs through its parts in steps")
            window_end = 0
            for part in parts:
                strides, indices, target = part.stride(), list(begin), nest.offsets[_TARGET]
                loops = [
                    loop._replace(source=loop.source // result.stride(axis) * strides[axis] if axis >= 0 else 0)
                    for loop, axis in zip(nest.loops, axes, strict=True)
                ]
                if len(parts) > 1:
                    window_begin, window_end = window_end, window_end + part.shape[dim]
                    count = loops[along[0]].rounds if along else 1
                    common = Range(begin[dim], begin[dim] + count).find_overlap(Range(window_begin, window_end))
                    if common is None:
                        continue
                    indices[dim] = common.begin - window_begin
                    if along:
                        target += (common.begin - begin[dim]) * loops[along[0]].target
                        loops[along[0]] = loops[along[0]]._replace(rounds=common.size)
                source = int(part.storage_offset()) + sum(map(operator.mul, indices, strides))
                yield _Assignment(tuple(loops), (0, target, source), nest.functions), part


@dataclass(frozen=True)
class WeightTrace:
    """The source of every element that loaders write."""

    boxes: list[Box] = field(default_factory=list)  # in the order of their tensors; those without one come first
    unexplained: dict[str, str] = field(default_factory=dict)  # reasons, by parameter

    def describe_unexplained(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.unexplained.items())


def trace_weights(model: nn.Module, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> WeightTrace:
    """Run a model's loaders on tensors without storage, (shape, dtype) by name."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    # Buffers of whole numbers are maps of experts, by which loaders choose.
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    maps = {name: buffer for name, buffer in model.named_buffers() if name not in buffers}
    recorder = _Recorder({**dict(model.named_parameters()), **buffers})
    untyped: Any = model
    # Some layers that propose tokens refuse a part of their tensors.
    with torch.no_grad(), disable_mtp_completeness_check(), recorder:
        untyped.load_weights(recorder.make_tensors(tensors))
    recorder.refuse_writes(maps)
    numbers = {name: number for number, name in enumerate(("", *tensors))}
    boxes = [box for name, boxes in recorder.boxes.items() if name not in recorder.unexplained for box in boxes]
    distinct = dict.fromkeys(boxes)  # some loaders copy a tensor twice
    return WeightTrace(sorted(distinct, key=lambda box: numbers[box.tensor]), recorder.unexplained)


def trace_model(model: nn.Module, tensors: Mapping[str, Sequence[int]], dtype: torch.dtype) -> WeightTrace:
    """Trace the loading of a model's tensors; the model is unchanged afterwards.

    `tensors`: shapes by name; `dtype`: of the tensors. vLLM's configuration has to be set (`set_current_vllm_config`).
    """
    from vllm.model_executor.model_loader.reload import layerwise

    layers = [RebuiltLayer(layer) for layer in model.modules() if is_derived(layer)]
    try:
        for layer in layers:
            for parameter in layer.restore_plain().parameters(recurse=False):
                parameter.weight_loader = layerwise._get_original_loader(parameter)  # quantisation may have wrapped it
        return trace_weights(model, {name: (tuple(shape), dtype) for name, shape in tensors.items()})
    finally:
        for layer in layers:
            layer.abandon()


class _Recorder(TorchDispatchMode):
    """Explains writes to parameters instead of executing them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.boxes: dict[str, list[Box]] = {name: [] for name in parameters}
        self.unexplained: dict[str, str] = {}
        self._storages: dict[int, _Storage] = {}
        for name, parameter in parameters.items():
            if self._find(parameter) is None:  # tied parameters have their first name
                self._add(_Storage(parameter.detach(), parameter=name))

    def make_tensors(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Iterator[tuple[str, Tensor]]:
        for name, (shape, dtype) in tensors.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._add(_Storage(tensor, tensor=name))
            yield name, tensor

    def refuse_writes(self, buffers: Mapping[str, Tensor]) -> None:
        """Record buffers that were not to be written, and were."""
        written = (name for name, buffer in buffers.items() if self._find(buffer) is not None)
        self.unexplained |= dict.fromkeys(written, "it is a buffer of whole numbers")

    def _add(self, storage: _Storage) -> None:
        self._storages[storage.full.untyped_storage()._cdata] = storage

    def _find(self, value: Any) -> _Storage | None:
        return self._storages.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, schema = func._schema.name.removeprefix("aten::"), dict(kwargs or {}), func._schema.arguments
        operands = [value for argument in args for value in (argument if isinstance(argument, list) else [argument])]
        storages = [storage for storage in map(self._find, operands) if storage is not None]
        if storages and schema[0].alias_info is not None and schema[0].alias_info.is_write:
            self._record_write(name, args[0], args[1:])
            return args[0]
        if kwargs.get("device") is not None and name == "_to_copy":
            # Loaders move tensors to their parameter's device. Indices of experts keep their values.
            has_source = any(not storage.parameter for storage in storages)
            kwargs["device"] = torch.device("meta") if has_source else args[0].device
        result = func(*args, **kwargs)
        if storages:
            name, args = _convert_selection(name, args)
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor) and self._find(tensor) is None:
                    self._add(_Storage(tensor, operation=name, arguments=(*args, *kwargs.values())))
        return result

    def _record_write(self, operation: str, target: Tensor, arguments: tuple[Any, ...]) -> None:
        storage = self._find(target)
        if storage is None or not storage.parameter:  # a tensor of the loader's own
            is_zero = operation == "zero_" and storage is not None and target.numel() == storage.full.numel()
            full = target if storage is None else storage.full
            self._add(_Storage(full, operation="full" if is_zero else f"{operation} into another tensor"))
            return
        try:
            self._explain(storage, operation, target, arguments)
        except _UnexplainedError as reason:
            self.unexplained[storage.parameter] = str(reason)

    def _explain(self, storage: _Storage, operation: str, target: Tensor, arguments: tuple[Any, ...]) -> None:
        source = arguments[0] if arguments else 0.0
        if not target.numel():
            return
        if target.dtype.itemsize != storage.full.dtype.itemsize:
            raise _UnexplainedError("it is written through a view of another size of elements")
        if isinstance(source, Tensor) and self._find(source) is None and source.numel() == 1 and not source.is_meta:
            source = float(source)
        if operation == "copy_" and isinstance(source, Tensor):
            self._explain_copy(storage, _Assignment.describe_copy(target, source), source)
        elif operation in ("zero_", "fill_", "copy_") and not isinstance(source, Tensor):
            self._add_boxes(storage, _Assignment.describe_copy(target, target), float(source))
        else:
            nest = _Assignment.describe_copy(target, target)
            self._change(storage, nest._replace(functions=_name_function(operation.removesuffix("_"), arguments)))

    def _explain_copy(self, storage: _Storage, assignment: _Assignment, view: Tensor) -> None:
        source = self._find(view)
        if source is None:
            raise _UnexplainedError("its values are not those of a tensor")
        if source.full.dtype.itemsize != view.dtype.itemsize:
            raise _UnexplainedError("its source is a view of another size of elements")
        if source.parameter:
            self._change(storage, assignment if source is storage else assignment._replace(loops=()))
        elif source.tensor:
            self._add_boxes(storage, assignment, source)
        elif source.operation == "full":
            self._add_boxes(storage, assignment, 0.0)
        elif source.operation == "cat":
            dim = source.arguments[1] % source.full.dim() if len(source.arguments) > 1 else 0
            for part_assignment, part in assignment.follow(source.full, source.arguments[0], dim):
                self._explain_copy(storage, part_assignment, part)
        else:
            functions = () if source.operation in _COPIES else _name_function(source.operation, source.arguments[1:])
            operand, dtype = source.arguments[0], source.full.dtype
            if dtype.itemsize < operand.dtype.itemsize and dtype != storage.full.dtype:
                raise _UnexplainedError(f"its values are rounded to {dtype}")
            for followed, part in assignment.follow(source.full, [operand.expand(source.full.shape)]):
                self._explain_copy(storage, followed._replace(functions=functions + followed.functions), part)

    def _change(self, storage: _Storage, assignment: _Assignment) -> None:
        """Apply functions of a whole parameter, in place, to what it has so far."""
        full, boxes = storage.full, self.boxes[storage.parameter]
        expected, actual = (
            [(part.loops, part.offsets) for part, *_ in nest.align(_TARGET, full)]
            for nest in (_Assignment.describe_copy(full, full), assignment)
        )
        if actual != expected or any(box.constant is not None for box in boxes):
            raise _UnexplainedError("parts of it are computed from parameters")
        functions = assignment.functions
        boxes[:] = [
            box._replace(layout=box.layout._replace(functions=box.layout.functions + functions)) for box in boxes
        ]

    def _add_boxes(self, storage: _Storage, assignment: _Assignment, source: _Storage | float) -> None:
        name, tensor = "", torch.empty((), device="meta")
        if isinstance(source, _Storage):
            name, tensor = source.tensor, source.full
        else:
            loops = tuple(loop._replace(source=0) for loop in assignment.loops)
            assignment = _Assignment(loops, (0, assignment.offsets[_TARGET], 0), (Function("full", source),))
        boxes = self.boxes[storage.parameter]
        for cut in assignment.find_cuts(storage.full, tensor):
            box = Box(storage.parameter, name, cut)
            hulls = (tuple(Range(*indices[:2]) for indices in old.layout.parameter) for old in boxes if old.tensor)
            if not name and any(find_overlap(cut.parameter, hull) is not None for hull in hulls):
                raise _UnexplainedError("parts of it are filled with a constant after they were loaded")
            boxes.append(box)


def _find_span(begin: Sequence[int], axis: int, loop: _Loop, side: int, full: Tensor) -> Range:
    """Find the indices of a loop in a dimension."""
    step = loop[side] // full.stride(axis)
    return Range(begin[axis], begin[axis] + (loop.rounds - 1) * step + 1, step)


def _name_function(operation: str, arguments: tuple[Any, ...]) -> tuple[Function, ...]:
    numbers = [argument for argument in arguments if isinstance(argument, int | float)]
    if operation not in get_args(FunctionName) or len(numbers) < len(arguments) or len(numbers) > 1:
        raise _UnexplainedError(f"its values are computed by {operation}")
    return (Function(cast(FunctionName, operation), *map(float, numbers)),)


def _convert_selection(name: str, arguments: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Express a selection of rows, and a stack, as a concatenation."""
    if name == "stack":
        dim = arguments[1] if len(arguments) > 1 else 0
        return "cat", ([part.unsqueeze(dim) for part in arguments[0]], dim)
    if name == "index" and sum(numbers is not None for numbers in arguments[1]) == 1:
        dim, numbers = next((dim, numbers) for dim, numbers in enumerate(arguments[1]) if numbers is not None)
    elif name == "index_select":
        dim, numbers = arguments[1:3]
    else:
        return name, arguments
    if numbers.is_meta or numbers.dim() != 1:
        return name, arguments
    rows = numbers.nonzero()[:, 0] if numbers.dtype == torch.bool else numbers
    return "cat", ([arguments[0].narrow(dim, row, 1) for row in rows.tolist()], dim)
