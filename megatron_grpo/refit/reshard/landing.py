"""Slices into vLLM's model: straight into the memory of a parameter where the layer computes with that, else into a
plain copy of the layer's weights that vLLM then makes its own form of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.places import Place
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.vllm_weights import Landing, landings
from megatron_grpo.refit.reshard.plan import Pieces, box_of
from megatron_grpo.refit.vllm_layers import forget_packed_experts, repack_tied_heads


class _Key(NamedTuple):
    entry: int
    layer: int
    expert: int


class ModelWriter:
    """Writes pieces of Hugging Face tensors into one worker's model.

    Args:
        model: vLLM's.
        dtype: of its activations.
        shape: sizes of the whole model.
        place: what the worker has of it.
        pieces: everything that a refit will bring, message by message.

    Raises:
        ValueError: vLLM's model has parameters that the refit does not bring, or brings otherwise.
    """

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype, shape: ModelShape, place: Place, pieces: Iterable[Pieces]
    ) -> None:
        self._model, self._dtype, self._shape, self._place = model, dtype, shape, place
        self._entries = weight_entries(shape)
        self._landings: dict[_Key, list[Landing]] = {}
        numbers: Counter[str] = Counter()
        for piece in (piece for some in pieces for piece in some):
            numbers[self._landing(piece).parameter] += _numbers(piece)
        self._expected: Counter[str] = Counter()
        """By module, how many numbers a refit brings."""
        for parameter, count in numbers.items():
            self._expected[parameter.rpartition(".")[0]] += count
        self._written: Counter[str] = Counter()
        layers = {name: model.get_submodule(name) for name in self._expected}
        self._rebuilt = {name: _Rebuilt(layer) for name, layer in layers.items() if _is_derived(layer)}
        self._require_all(numbers)

    def begin(self) -> None:
        """Nothing of the next version is written yet."""
        self._written.clear()

    def write(self, piece: Any, values: Tensor) -> None:
        """Put a piece where it belongs.

        Args:
            piece: PIECE, one of those that the writer was made for.
            values: [rows, columns], in any dtype.
        """
        landing = self._landing(piece)
        module, _, name = landing.parameter.rpartition(".")
        rebuilt = self._rebuilt.get(module)
        layer = self._model.get_submodule(module) if rebuilt is None else rebuilt.opened()
        parameter: Tensor = getattr(layer, name).data
        if landing.expert is not None:
            parameter = parameter[landing.expert]
        box = box_of(landing.part)
        rows, columns = piece["rows"] - box.row + landing.row, piece["columns"] - box.column
        matrix = parameter if parameter.dim() == 2 else parameter[:, None]
        matrix[rows[0] : rows[1], columns[0] : columns[1]].copy_(values)
        self._written[module] += values.numel()
        if rebuilt is not None and self._written[module] == self._expected[module]:
            rebuilt.close()

    def finish(self) -> None:
        """Let attention and tied heads make what they derive from weights of other layers."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        assert self._written == self._expected, "every message has come"
        for layer in self._model.modules():
            if is_deferred_attention_layer(layer):
                attention: Any = layer
                attention.process_weights_after_loading(self._dtype)
        if next(self._model.parameters()).device.type == "cpu":
            repack_tied_heads(self._model)

    def abandon(self) -> None:
        """Put back what layers that are half written had before."""
        for layer in self._rebuilt.values():
            layer.abandon()

    def _landing(self, piece: Any) -> Landing:
        key = _Key(int(piece["entry"]), int(piece["layer"]), int(piece["expert"]))
        if key not in self._landings:
            self._landings[key] = landings(self._entries[key.entry], self._shape, self._place, key.layer, key.expert)
        return self._landings[key][piece["tensor"]]

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
        """Vocabularies are padded; some models keep an embedding or a head on stages that do not use it."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        return found < wanted and isinstance(self._model.get_submodule(name.rpartition(".")[0]), VocabParallelEmbedding)


def _numbers(piece: Any) -> int:
    (row, row_end), (column, column_end) = piece["rows"], piece["columns"]
    return int((row_end - row) * (column_end - column))


def _plain_sizes(model: torch.nn.Module) -> dict[str, int]:
    """How many numbers each parameter has before vLLM makes its own form of the layer."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        f"{module}.{name}": parameter.numel()
        for module, layer in model.named_modules()
        for name, parameter in get_layerwise_info(layer).restore_metadata[0].items()
    }


def _is_derived(layer: torch.nn.Module) -> bool:
    """Whether a layer computes with something else than its plain weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, UnquantizedEmbeddingMethod):
        return False
    on_cpu = all(parameter.device.type == "cpu" for parameter in layer.parameters())
    return on_cpu or not isinstance(method, UnquantizedLinearMethod)


class _Rebuilt:
    """A layer that vLLM makes its own form of: on a CPU all that multiply, elsewhere experts and quantised layers."""

    def __init__(self, layer: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._layer: Any = layer
        self._reload: Any = layerwise
        self._info = layerwise.get_layerwise_info(layer)

    def opened(self) -> Any:
        """The layer, with plain weights to write to."""
        info, layer = self._info, self._layer
        if info.kernel_tensors is None:
            info.kernel_tensors = self._reload.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            self._reload.restore_layer_on_meta(layer, info)
            self._reload.materialize_layer(layer, info)
        return layer

    def close(self) -> None:
        """Let vLLM make its form of the plain weights, in the memory of what was there before."""
        layer = self._layer
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        forget_packed_experts(layer)
        layer.quant_method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()
        self._reload._copy_and_restore_kernel_tensors(layer, self._info)
        self._info.reset()

    def abandon(self) -> None:
        """Put back what was there before, if the layer is open."""
        if self._info.kernel_tensors is not None:
            self._reload._place_kernel_tensors(self._layer, self._info)
            self._info.reset()
