"""Runs in an engine's worker: writes the slices of a reshard refit into vLLM's model.

A slice goes straight into the memory of a parameter where the layer computes with its plain weights, and otherwise into
plain weights that vLLM converts when the last slice of the layer has come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import Destination, RankShard, find_destinations
from megatron_grpo.models.weight_map import is_per_layer
from megatron_grpo.weight_sync.engine_layers import (
    BlockedLayer,
    RebuiltLayer,
    finish_model,
    is_derived,
    keeps_blocks,
    require_plain,
    scales_name,
)
from megatron_grpo.weight_sync.transfer_plan import Pieces, box_of
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks


class _Region(NamedTuple):
    """The rows and columns of a parameter that a piece is written to."""

    module: str
    name: str
    """Name of the parameter in the module."""
    expert: int | None
    rows: slice
    columns: slice
    scaled: bool
    """Whether the piece comes in FP8, with scales."""

    @property
    def size(self) -> int:
        """Number of elements in the piece."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)

    @property
    def blocks(self) -> list[slice]:
        """Rows and columns of the region's scales; it starts with a block (`find_cut_blocks`)."""
        sides = (self.rows, self.columns)
        assert not any(side.start % BLOCK for side in sides), f"{self} begins inside a block"
        return [slice(side.start // BLOCK, count_blocks(side.stop)) for side in sides]


class ModelWriter:
    """Writes pieces of Hugging Face tensors into one worker's model.

    Args:
        model: vLLM's model.
        dtype: dtype of the model's activations.
        shape: sizes of the whole model.
        shard: the part of the model that the worker holds.
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
        shape: ModelShape,
        shard: RankShard,
        messages: Sequence[Pieces],
        scaled: Collection[int] = (),
    ) -> None:
        require_plain(model)
        self._model, self._dtype = model, dtype
        self._messages = _regions(shape, shard, messages, scaled)
        regions = [region for message in self._messages for region in message]
        self._expected = Counter[str]()
        """Number of elements that a refit brings, by module."""
        for region in regions:
            self._expected[region.module] += region.size
        self._written: Counter[str] = Counter()
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in self._expected}
        in_fp8 = self._fp8_parameters(regions)
        self._rebuilt = {
            name: BlockedLayer(layer, in_fp8[name]) if name in in_fp8 else RebuiltLayer(layer)
            for name, layer in self._layers.items()
            if name in in_fp8 or is_derived(layer)
        }
        # vLLM's names of the parameters outside layers that only other pipeline stages compute with.
        outside = [entry for entry in build_weight_map(shape) if not is_per_layer(entry.megatron[0])]
        others = [one for entry in outside if not shard.keeps(entry) for one in find_destinations(entry, shape, shard)]
        self._require_all(regions, {one.parameter for one in others})

    def begin(self) -> None:
        """Reset the counts of written elements."""
        self._written.clear()

    def write(self, message: int, position: int, values: Tensor, scales: Tensor | None = None) -> None:
        """Write a piece to its region.

        Args:
            message: number of the piece's message.
            position: number of the piece in the message.
            values: [rows, columns], in any dtype.
            scales: [blocks of rows, blocks of columns], float32, of a piece in FP8.
        """
        to = self._messages[message][position]
        rebuilt = self._rebuilt.get(to.module)
        layer = self._layers[to.module] if rebuilt is None else rebuilt.open()
        _matrix(layer, to.name, to.expert)[to.rows, to.columns].copy_(values)
        if scales is not None:
            _matrix(layer, scales_name(to.name), to.expert)[tuple(to.blocks)].copy_(scales)
        self._written[to.module] += values.numel()
        if rebuilt is not None and self._written[to.module] == self._expected[to.module]:
            rebuilt.close()

    def finish(self) -> None:
        """Recompute what attention layers and tied heads derive from the weights of other layers."""
        assert self._written == self._expected, "every message has come"
        finish_model(self._model, self._dtype)

    def abandon(self) -> None:
        """Restore the previous weights of incomplete layers."""
        for layer in self._rebuilt.values():
            layer.abandon()

    def _fp8_parameters(self, regions: Sequence[_Region]) -> dict[str, set[str]]:
        """Names of the parameters that come in FP8, by module."""
        names: defaultdict[str, set[str]] = defaultdict(set)
        for region in regions:
            if region.scaled:
                names[region.module].add(region.name)
        others = [module for module in names if not keeps_blocks(self._layers[module])]
        if others:
            text = "refit.fp8_blocks=true, and these layers of vLLM's model have no blocks of 128x128 in FP8: "
            raise ValueError(text + ", ".join(sorted(others)))
        return names

    def _require_all(self, regions: Sequence[_Region], unused: Collection[str]) -> None:
        """Check that each parameter gets as many elements as it has before vLLM converts it; ValueError if not."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        numbers: Counter[str] = Counter()
        for one in regions:
            numbers[f"{one.module}.{one.name}"] += one.size
            if one.scaled:
                rows, columns = one.blocks
                scales = (rows.stop - rows.start) * (columns.stop - columns.start)
                numbers[f"{one.module}.{scales_name(one.name)}"] += scales
        missing = []
        for module, layer in self._model.named_modules():
            for last, parameter in get_layerwise_info(layer).restore_metadata[0].items():
                name, wanted = f"{module}.{last}", parameter.numel()
                found = numbers[name]
                # Vocabularies are padded; some models keep an embedding, a norm or a head on stages that do not use it.
                padded = found < wanted and isinstance(layer, VocabParallelEmbedding)
                if found != wanted and not padded and (found or name not in unused):
                    missing.append(f"{name}: {found} of {wanted} numbers")
        if missing:
            text = "refit.mode=reshard does not fill vLLM's model; use broadcast. "
            raise ValueError(text + "; ".join(missing))


def _regions(
    shape: ModelShape, shard: RankShard, messages: Sequence[Pieces], scaled: Collection[int]
) -> list[list[_Region]]:
    """For each message the regions of its pieces, on a rank that holds `shard`."""
    entries = build_weight_map(shape)

    @cache
    def destinations_of(entry: int, layer: int, expert: int) -> list[Destination]:
        return find_destinations(entries[entry], shape, shard, layer, expert)

    def region(piece: Any) -> _Region:
        entry = int(piece["entry"])
        destination = destinations_of(entry, int(piece["layer"]), int(piece["expert"]))[piece["tensor"]]
        box = box_of(destination.part)
        rows = (piece["rows"] - box.row + destination.row).tolist()
        columns = (piece["columns"] - box.column).tolist()
        module, _, name = destination.parameter.rpartition(".")
        return _Region(module, name, destination.expert, slice(*rows), slice(*columns), entry in scaled)

    return [[region(piece) for piece in pieces] for pieces in messages]


def _matrix(layer: torch.nn.Module, name: str, expert: int | None) -> Tensor:
    """[rows, columns]: a parameter, or an expert's part of one."""
    parameter: Tensor = getattr(layer, name).data
    if expert is not None:
        parameter = parameter[expert]
    return parameter if parameter.dim() == 2 else parameter[:, None]
