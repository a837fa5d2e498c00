"""Slices into vLLM's model: straight into the memory of a parameter where the layer computes with that, else into a
plain copy of the layer's weights that vLLM then makes its own form of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.weights.families import weight_entries
from megatron_grpo.weights.families.family import is_per_layer
from megatron_grpo.weights.layouts import BLOCK, Landing, Place, landings
from megatron_grpo.weights.refit.engine_layers import (
    BlockedLayer,
    LayerMemory,
    RebuiltLayer,
    finish_model,
    is_derived,
    keeps_blocks,
    scales_name,
)
from megatron_grpo.weights.refit.plan import Pieces, blocks, box_of, keeps
from megatron_grpo.weights.shape import ModelShape


class _Destination(NamedTuple):
    """Where a piece belongs."""

    module: str
    name: str
    """Of the parameter in the module."""
    expert: int | None
    rows: slice
    columns: slice
    scaled: bool
    """Whether it comes in FP8, with scales."""

    @property
    def size(self) -> int:
        """Numbers of the piece."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)

    @property
    def blocks(self) -> tuple[slice, slice]:
        """Rows and columns of its scales."""
        return _in_blocks(self.rows), _in_blocks(self.columns)


class ModelWriter:
    """Writes pieces of Hugging Face tensors into one worker's model.

    Args:
        model: vLLM's.
        dtype: of its activations.
        shape: sizes of the whole model.
        place: what the worker has of it.
        messages: [pieces], PIECE, of each message of a refit.
        scaled: rows of the model's table whose tensors come in FP8, with scales.

    Raises:
        ValueError: vLLM's model has parameters that the refit does not bring, or brings otherwise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        shape: ModelShape,
        place: Place,
        messages: Sequence[Pieces],
        scaled: Collection[int] = (),
    ) -> None:
        self._model, self._dtype = model, dtype
        destinations = _Destinations(shape, place, scaled)
        self._messages = [[destinations.of(piece) for piece in pieces] for pieces in messages]
        numbers: Counter[str] = Counter()
        self._expected: Counter[str] = Counter()
        """By module, how many numbers a refit brings."""
        for one in (one for message in self._messages for one in message):
            numbers[f"{one.module}.{one.name}"] += one.size
            self._expected[one.module] += one.size
            if one.scaled:
                rows, columns = one.blocks
                scales = (rows.stop - rows.start) * (columns.stop - columns.start)
                numbers[f"{one.module}.{scales_name(one.name)}"] += scales
        self._written: Counter[str] = Counter()
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in self._expected}
        blocked = self._blocked()
        rebuilt = {name: layer for name, layer in self._layers.items() if name in blocked or is_derived(layer)}
        self._memory = LayerMemory(list(rebuilt.values()))
        self._rebuilt = {
            name: BlockedLayer(layer, self._memory, blocked[name])
            if name in blocked
            else RebuiltLayer(layer, self._memory)
            for name, layer in rebuilt.items()
        }
        self._unused = _of_other_stages(shape, place)
        self._require_all(numbers)

    def begin(self) -> None:
        """Nothing of the next version is written yet."""
        self._written.clear()

    def write(self, message: int, position: int, values: Tensor, scales: Tensor | None = None) -> None:
        """Put a piece where it belongs.

        Args:
            message: number of its message.
            position: its number in the message.
            values: [rows, columns], in any dtype.
            scales: [blocks of rows, blocks of columns], float32, of a piece in FP8.
        """
        to = self._messages[message][position]
        rebuilt = self._rebuilt.get(to.module)
        layer = self._layers[to.module] if rebuilt is None else rebuilt.opened()
        _matrix(layer, to.name, to.expert)[to.rows, to.columns].copy_(values)
        if scales is not None:
            _matrix(layer, scales_name(to.name), to.expert)[to.blocks].copy_(scales)
        self._written[to.module] += values.numel()
        if rebuilt is not None and self._written[to.module] == self._expected[to.module]:
            rebuilt.close()

    def finish(self) -> None:
        """Let attention and tied heads make what they derive from weights of other layers."""
        assert self._written == self._expected, "every message has come"
        finish_model(self._model, self._dtype, self._memory)

    def abandon(self) -> None:
        """Put back what layers that are half written had before."""
        for layer in self._rebuilt.values():
            layer.abandon()

    def _blocked(self) -> dict[str, set[str]]:
        """By module, the names of parameters that come in FP8."""
        names: defaultdict[str, set[str]] = defaultdict(set)
        for one in (one for message in self._messages for one in message if one.scaled):
            names[one.module].add(one.name)
        others = [module for module in names if not keeps_blocks(self._layers[module])]
        if others:
            text = "refit.fp8_blocks=true, and these layers of vLLM's model have no blocks of 128x128 in FP8: "
            raise ValueError(text + ", ".join(sorted(others)))
        return names

    def _require_all(self, numbers: Counter[str]) -> None:
        """Compare what comes with what vLLM's model has."""
        missing = []
        for name, wanted in _plain_sizes(self._model).items():
            if numbers[name] != wanted and not self._may_differ(name, numbers[name], wanted):
                missing.append(f"{name}: {numbers[name]} of {wanted} numbers")
        if missing:
            text = "refit.mode=reshard does not fill vLLM's model; use broadcast. "
            raise ValueError(text + "; ".join(missing))

    def _may_differ(self, name: str, found: int, wanted: int) -> bool:
        """Vocabularies are padded; some models keep an embedding, a norm or a head on stages that do not use it."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if not found and name in self._unused:
            return True
        return found < wanted and isinstance(self._model.get_submodule(name.rpartition(".")[0]), VocabParallelEmbedding)


class _Destinations:
    """Finds where pieces belong on a rank."""

    def __init__(self, shape: ModelShape, place: Place, scaled: Collection[int]) -> None:
        self._shape, self._place, self._scaled = shape, place, scaled
        self._entries = weight_entries(shape)
        self._landings: dict[tuple[int, int, int], list[Landing]] = {}

    def of(self, piece: Any) -> _Destination:
        """Where a piece, PIECE, belongs."""
        entry, layer, expert = key = int(piece["entry"]), int(piece["layer"]), int(piece["expert"])
        if key not in self._landings:
            self._landings[key] = landings(self._entries[entry], self._shape, self._place, layer, expert)
        landing = self._landings[key][piece["tensor"]]
        box = box_of(landing.part)
        rows = (piece["rows"] - box.row + landing.row).tolist()
        columns = (piece["columns"] - box.column).tolist()
        module, _, name = landing.parameter.rpartition(".")
        return _Destination(module, name, landing.expert, slice(*rows), slice(*columns), entry in self._scaled)


def _of_other_stages(shape: ModelShape, place: Place) -> set[str]:
    """Names of vLLM's parameters that belong to no layer, and that other stages than the rank's compute with."""
    outside = [entry for entry in weight_entries(shape) if not is_per_layer(entry.megatron[0])]
    return {one.parameter for entry in outside if not keeps(entry, place) for one in landings(entry, shape, place)}


def _in_blocks(side: slice) -> slice:
    """Blocks that rows or columns are in; the first of these begins one."""
    assert side.start % BLOCK == 0, f"{side} begins inside a block"
    return slice(side.start // BLOCK, blocks(side.stop))


def _matrix(layer: torch.nn.Module, name: str, expert: int | None) -> Tensor:
    """[rows, columns]: a parameter, or an expert's part of one."""
    parameter: Tensor = getattr(layer, name).data
    if expert is not None:
        parameter = parameter[expert]
    return parameter if parameter.dim() == 2 else parameter[:, None]


def _plain_sizes(model: torch.nn.Module) -> dict[str, int]:
    """How many numbers each parameter has before vLLM makes its own form of the layer."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        f"{module}.{name}": parameter.numel()
        for module, layer in model.named_modules()
        for name, parameter in get_layerwise_info(layer).restore_metadata[0].items()
    }
