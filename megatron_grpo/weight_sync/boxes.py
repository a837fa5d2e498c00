"""Boxes: which part of a Hugging Face tensor is which part of a parameter of an engine's rank.

`weight_trace` finds them by running vLLM's loaders; the plan of a refit, the writer and the fingerprints read them.
"""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor


class Range(NamedTuple):
    """Every `step`-th index from `begin` to before `end`; `end` is one behind the last."""

    begin: int
    end: int
    step: int = 1

    @property
    def size(self) -> int:
        return -(-(self.end - self.begin) // self.step)

    def find_overlap(self, interval: Range) -> Range | None:
        """Find the indices inside an interval, whose step is 1."""
        begin = self.begin + max(-(-(interval.begin - self.begin) // self.step), 0) * self.step
        count = -(-(min(self.end, interval.end) - begin) // self.step)
        return Range(begin, begin + (count - 1) * self.step + 1, self.step) if count > 0 else None


Ranges = tuple[Range, ...]
"""A range in each dimension of a tensor."""


# Functions whose result's element i depends on element i of one tensor alone; and one without a tensor.
FunctionName = Literal[
    "abs", "add", "div", "exp", "log", "mul", "neg", "pow", "reciprocal", "rsqrt", "sqrt", "sub", "full"
]


class Function(NamedTuple):
    """A function of `torch`, and its argument behind the tensor."""

    name: FunctionName
    argument: float | None = None


class BoxLayout(NamedTuple):
    """Which elements of a tensor lie where in a parameter."""

    tensor: Ranges
    parameter: Ranges
    order: tuple[int, ...]
    """For each dimension of the parameter the tensor's dimension that runs along it; -1: none, all elements along it
    are equal. Dimensions of the tensor that are missing have one index."""
    functions: tuple[Function, ...] = ()
    """Functions that change the values, one after the other."""

    def locate(self, part: Ranges) -> Ranges:
        """Find the position in the parameter of a part of `tensor`."""
        position = []
        for target, axis in zip(self.parameter, self.order, strict=True):
            if axis >= 0:
                first = (part[axis].begin - self.tensor[axis].begin) // self.tensor[axis].step
                begin = target.begin + first * target.step
                target = Range(begin, begin + (part[axis].size - 1) * target.step + 1, target.step)
            position.append(target)
        return tuple(position)

    def arrange(self, values: Tensor) -> Tensor:
        """View values in the tensor's dimensions in those of the parameter."""
        if self.order == tuple(range(values.dim())):
            return values
        axes = [axis for axis in self.order if axis >= 0]
        single = [axis for axis in range(values.dim()) if axis not in axes]
        values = values.permute(*single, *axes)[(0,) * len(single)]
        return values[tuple(slice(None) if axis >= 0 else None for axis in self.order)]

    def compute(self, values: Tensor) -> Tensor:
        """Compute what the parameter has for values of the tensor."""
        if self.functions:
            values = values.float()
        for name, argument in self.functions:
            values = getattr(torch, name)(*([values] if argument is None else [values, argument]))
        return self.arrange(values)


class Box(NamedTuple):
    """A part of an engine's parameter, and the tensor that fills it."""

    parameter: str
    tensor: str  # "": the box has one value, that of the function "full"
    layout: BoxLayout

    @property
    def constant(self) -> float | None:
        """Value of a box without a tensor."""
        return None if self.tensor else self.layout.functions[0].argument


def count_elements(ranges: Ranges) -> int:
    return math.prod(indices.size for indices in ranges)


def to_slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(*indices) for indices in ranges)


def find_overlap(part: Ranges, intervals: Ranges) -> Ranges | None:
    """Find the common indices of a part and of a box without steps."""
    common = [indices.find_overlap(interval) for indices, interval in zip(part, intervals, strict=True)]
    return None if None in common else tuple(indices for indices in common if indices is not None)


def list_full_boxes(tensors: Mapping[str, tuple[int, ...]]) -> list[Box]:
    """List boxes of full tensors, as if an engine had parameters of their names."""
    boxes = []
    for name, sizes in tensors.items():
        ranges = tuple(Range(0, size) for size in sizes)
        boxes.append(Box(name, name, BoxLayout(ranges, ranges, tuple(range(len(sizes))))))
    return boxes


_BOXES: TypeAdapter[list[Box]] = TypeAdapter(list[Box])


def pack_boxes(boxes: Sequence[Box]) -> str:
    """Pack a rank's boxes in text that messages of vLLM and of servers carry."""
    return base64.b85encode(zlib.compress(_BOXES.dump_json(list(boxes)))).decode()


def unpack_boxes(text: str) -> list[Box]:
    boxes = _BOXES.validate_json(zlib.decompress(base64.b85decode(text)))
    layouts: dict[BoxLayout, BoxLayout] = {}  # equal layouts, of which there are many, become one object
    return [box._replace(layout=layouts.setdefault(box.layout, box.layout)) for box in boxes]


def compute_digest(packed: str) -> str:
    return hashlib.blake2b(packed.encode(), digest_size=16).hexdigest()
