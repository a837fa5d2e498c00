"""Runs in an engine's worker: writes the slices of a reshard refit into vLLM's model.

A slice goes straight into the memory of a parameter where the layer computes with its plain weights. Elsewhere it goes
into a plain parameter, and vLLM converts the layer when its last slice has come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.models.weight_layouts import Destination, RankShard, find_destinations
from megatron_grpo.models.weight_map import ModelMap
from megatron_grpo.weight_sync.engine_layers import (
    RebuiltLayer,
    finish_model,
    is_derived,
    name_scales,
    require_plain,
    uses_fp8_blocks,
)
from megatron_grpo.weight_sync.pieces import Pieces, find_box
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks


class _Region(NamedTuple):
    """The rows and columns of a parameter that a piece is written to."""

    module: str
    name: str  # of the parameter in the module
    expert: int | None
    rows: slice
    columns: slice
    has_scales: bool  # the piece comes in FP8, with scales

    @property
    def size(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)

    @property
    def blocks(self) -> tuple[slice, slice]:
        """Rows and columns of the region's scales; it starts with a block (`find_cut_blocks`)."""
        for part in (self.rows, self.columns):
            assert part.start % BLOCK == 0, f"{self} begins inside a block"
        rows, columns = (slice(part.start // BLOCK, count_blocks(part.stop)) for part in (self.rows, self.columns))
        return rows, columns


class ModelWriter:
    """Writes pieces of Hugging Face tensors into one worker's model.

    Args:
        dtype: dtype of the model's activations.
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
        model_map: ModelMap,
        shard: RankShard,
        messages: Sequence[Pieces],
        scaled: Collection[int] = (),
    ) -> None:
        require_plain(model)
        self._model, self._dtype = model, dtype
        self._messages = _find_regions(model_map, shard, messages, scaled)
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
        # Parameters outside layers that only other stages compute with.
        unused = {
            destination.parameter
            for entry in model_map.entries
            if entry.half is None and not shard.keeps(entry)
            for destination in find_destinations(entry, model_map.shape, shard)
        }
        self._require_filled(regions, unused)

    def begin(self) -> None:
        self._written.clear()

    def write(self, message: int, index: int, values: Tensor, scales: Tensor | None = None) -> None:
        """Write a piece, by its message and index there.

        `values`: [rows, columns]. `scales`: [blocks of rows, blocks of columns], float32, of a piece in FP8.
        """
        region = self._messages[message][index]
        rebuilt = self._rebuilt.get(region.module)
        layer = self._layers[region.module] if rebuilt is None else rebuilt.open()
        _view_matrix(layer, region.name, region.expert)[region.rows, region.columns].copy_(values)
        if scales is not None:
            _view_matrix(layer, name_scales(region.name), region.expert)[region.blocks].copy_(scales)
        self._written[region.module] += values.numel()
        if rebuilt is not None and self._written[region.module] == self._expected[region.module]:
            rebuilt.close()

    def finish(self) -> None:
        assert self._written == self._expected, "every message has come"
        finish_model(self._model, self._dtype)

    def abandon(self) -> None:
        for layer in self._rebuilt.values():
            layer.abandon()

    def _require_filled(self, regions: Sequence[_Region], unused: Collection[str]) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        received: Counter[str] = Counter()
        for region in regions:
            received[f"{region.module}.{region.name}"] += region.size
            if region.has_scales:
                rows, columns = region.blocks
                scales = (rows.stop - rows.start) * (columns.stop - columns.start)
                received[f"{region.module}.{name_scales(region.name)}"] += scales
        problems = []
        for module, layer in self._model.named_modules():
            for parameter_name, parameter in get_layerwise_info(layer).restore_metadata[0].items():
                name, expected = f"{module}.{parameter_name}", parameter.numel()
                count = received[name]
                # Vocabularies are padded; some models keep an embedding, a norm or a head on stages that do not use it.
                is_padded = count < expected and isinstance(layer, VocabParallelEmbedding)
                if count != expected and not is_padded and (count or name not in unused):
                    problems.append(f"{name}: {count} of {expected} numbers")
        if problems:
            raise ValueError(f"refit.mode=reshard does not fill vLLM's model; use broadcast. {'; '.join(problems)}")


def _find_regions(
    model_map: ModelMap, shard: RankShard, messages: Sequence[Pieces], scaled: Collection[int]
) -> list[list[_Region]]:
    @cache
    def find_cached(entry: int, layer: int, expert: int) -> list[Destination]:
        return find_destinations(model_map.entries[entry], model_map.shape, shard, layer, expert)

    def find_region(piece: Any) -> _Region:
        entry = int(piece["entry"])
        destination = find_cached(entry, int(piece["layer"]), int(piece["expert"]))[piece["tensor"]]
        box = find_box(destination.part)
        rows = (piece["rows"] - box.row + destination.row).tolist()
        columns = (piece["columns"] - box.column).tolist()
        module, _, name = destination.parameter.rpartition(".")
        return _Region(module, name, destination.expert, slice(*rows), slice(*columns), entry in scaled)

    return [[find_region(piece) for piece in pieces] for pieces in messages]


def _view_matrix(layer: torch.nn.Module, name: str, expert: int | None) -> Tensor:
    parameter: Tensor = getattr(layer, name).data
    if expert is not None:
        parameter = parameter[expert]
    return parameter if parameter.dim() == 2 else parameter[:, None]
