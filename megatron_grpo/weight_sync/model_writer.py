"""Runs in an engine's worker: writes the slices of a reshard refit into vLLM's model.

A slice goes straight into the memory of a parameter where the layer computes with its plain weights. Elsewhere it goes
into a plain parameter, and vLLM converts the layer when its last slice has come.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.weight_sync.boxes import Box, BoxLayout, Ranges, count_elements, to_slices
from megatron_grpo.weight_sync.engine_layers import (
    RebuiltLayer,
    finish_model,
    is_derived,
    iterate_refitted,
    name_scales,
    require_plain,
    uses_fp8_blocks,
)
from megatron_grpo.weight_sync.pieces import Pieces, read_ranges
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks


class _Region(NamedTuple):
    """The part of a parameter that a piece is written to."""

    module: str
    name: str  # of the parameter in the module
    ranges: Ranges
    layout: BoxLayout
    has_scales: bool  # the piece comes in FP8, with scales
    # Of `ranges`, computed once: a rank writes tens of thousands of pieces, and the host's time for them is a refit's.
    indices: tuple[slice, ...]
    size: int

    @property
    def blocks(self) -> tuple[slice, ...]:
        """Indices of the region's scales; ValueError: it begins inside a block."""
        *leading, rows, columns = self.ranges
        if rows.begin % BLOCK or columns.begin % BLOCK:
            text = f"{self.module}.{self.name} at {rows.begin}, {columns.begin}; use false"
            raise ValueError(f"refit.fp8_blocks=true, and workers would get a part of a block of 128 x 128: {text}")
        blocks = (slice(part.begin // BLOCK, count_blocks(part.end)) for part in (rows, columns))
        return *to_slices(tuple(leading)), *blocks


class ModelWriter:
    """Writes pieces of Hugging Face tensors into one worker's model.

    Args:
        dtype: dtype of the model's activations.
        boxes: the source of every element of the model's parameters.
        messages: for each message of a refit its pieces, [pieces], PIECE.
        scaled: rows of the weight map whose tensors come in FP8, with scales.

    Raises:
        ValueError: vLLM's model has parameters that the refit does not fill, or fills with another number of values, or
            that vLLM has rewritten.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        boxes: Sequence[Box],
        messages: Sequence[Pieces],
        scaled: Collection[int] = (),
    ) -> None:
        require_plain(model)
        self._model, self._dtype = model, dtype
        self._messages = [[_find_region(boxes, piece, scaled) for piece in pieces] for pieces in messages]
        regions = [region for message in self._messages for region in message]
        self._expected, self._written = Counter[str](), Counter[str]()  # numbers of elements in a refit, by module
        fp8_parameters: defaultdict[str, set[str]] = defaultdict(set)
        for region in regions:
            self._expected[region.module] += region.size
            if region.has_scales:
                fp8_parameters[region.module].add(region.name)
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in self._expected}
        unsuitable = sorted(module for module in fp8_parameters if not uses_fp8_blocks(self._layers[module]))
        if unsuitable:
            text = "refit.fp8_blocks=true, and these layers of vLLM's model have no blocks of 128x128 in FP8: "
            raise ValueError(text + ", ".join(unsuitable))
        self._rebuilt = {
            name: RebuiltLayer(layer, fp8_parameters.get(name, ()))
            for name, layer in self._layers.items()
            if name in fp8_parameters or is_derived(layer)
        }
        # Boxes that no tensor fills, by module: other parameters keep what vLLM has given them.
        self._constants: defaultdict[str, list[Box]] = defaultdict(list)
        for box in boxes:
            if box.constant is not None:
                self._constants[box.parameter.rpartition(".")[0]].append(box)
        self._require_filled(regions, boxes)

    def begin(self) -> None:
        self._written.clear()

    def write(self, message: int, index: int, values: Tensor, scales: Tensor | None = None) -> None:
        """Write a piece, by its message and index there.

        `values` are in the tensor's dimensions. `scales`: [blocks of rows, blocks of columns], float32, of a piece in
        FP8.
        """
        region = self._messages[message][index]
        rebuilt = self._rebuilt.get(region.module)
        layer = self._layers[region.module] if rebuilt is None else rebuilt.open()
        if rebuilt is not None and not self._written[region.module]:
            for box in self._constants[region.module]:
                parameter = getattr(layer, box.parameter.rpartition(".")[2])
                parameter.data[to_slices(box.layout.parameter)] = box.constant
        getattr(layer, region.name).data[region.indices].copy_(region.layout.compute(values))
        if scales is not None:
            getattr(layer, name_scales(region.name)).data[region.blocks].copy_(region.layout.arrange(scales))
        self._written[region.module] += region.size
        if rebuilt is not None and self._written[region.module] == self._expected[region.module]:
            rebuilt.close()

    def finish(self) -> None:
        assert self._written == self._expected, "every message has come"
        finish_model(self._model, self._dtype)

    def abandon(self) -> None:
        for layer in self._rebuilt.values():
            layer.abandon()

    def _require_filled(self, regions: Sequence[_Region], boxes: Sequence[Box]) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        received, constant = Counter[str](), Counter[str]()
        for region in regions:
            received[f"{region.module}.{region.name}"] += region.size
            if region.has_scales:
                blocks = region.blocks
                scales = math.prod(len(range(*part.indices(part.stop))) for part in blocks)
                received[f"{region.module}.{name_scales(region.name)}"] += scales
        for box in itertools.chain(*self._constants.values()):
            constant[box.parameter] += count_elements(box.layout.parameter)
        problems = []
        # A head that is tied to the embedding may be another parameter in the same memory.
        first_names = {parameter.data_ptr(): name for name, parameter in reversed([*self._model.named_parameters()])}
        # vLLM records what a layer had when it was loaded. Others appear later, such as products of latent attention.
        records = {name: get_layerwise_info(layer).restore_metadata[0] for name, layer in self._model.named_modules()}
        is_recorded = any(records.values())
        for module, layer in iterate_refitted(self._model, boxes):
            plain = {} if is_derived(layer) else dict(layer.named_parameters(recurse=False))
            for parameter_name, parameter in (records[module] if is_recorded else plain).items():
                name, expected = f"{module}.{parameter_name}", parameter.numel()
                is_tied = parameter_name in plain and first_names[plain[parameter_name].data_ptr()] != name
                if expected not in (received[name], received[name] + constant[name]) and not is_tied:
                    problems.append(f"{name}: {received[name]} of {expected} numbers")
        if problems:
            raise ValueError(f"refit.mode=reshard does not fill vLLM's model; use broadcast. {'; '.join(problems)}")


def _find_region(boxes: Sequence[Box], piece: Any, scaled: Collection[int]) -> _Region:
    box = boxes[piece["box"]]
    module, _, name = box.parameter.rpartition(".")
    ranges = box.layout.locate(read_ranges(piece))
    has_scales = int(piece["entry"]) in scaled
    return _Region(module, name, ranges, box.layout, has_scales, to_slices(ranges), count_elements(ranges))
