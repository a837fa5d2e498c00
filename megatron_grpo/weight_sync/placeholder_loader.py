"""Runs in an engine's worker: starts a model whose weights a refit brings, without reading them from its folder.

vLLM's own loaders run on placeholders, tensors of one number that have the names and shapes of the tensors that a refit
sends. So the first refit overwrites each of them, and no other element: padding, scales and buffers are what vLLM makes
them where it reads a folder. (vLLM's format "dummy" would change these too.) Where the folder fills an element that no
refit sends, it is read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

from megatron_grpo.weight_sync.boxes import count_elements
from megatron_grpo.weight_sync.weight_trace import trace_weights

logger = logging.getLogger(__name__)

# Small, so that sums of thousands of products stay small, and not zero, which quantisation would divide by.
PLACEHOLDER = 1e-3

Shapes = Mapping[str, tuple[int, ...]]


@register_model_loader("megatron_grpo")
class PlaceholderLoader(DefaultModelLoader):
    """Loads placeholders, or the folder where it has to be read."""

    def __init__(self, load_config: Any) -> None:
        load_config = copy(load_config)
        load_config.load_format = "hf"
        super().__init__(load_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
        """Yield the tensors to load, as vLLM's loader does."""
        sent, stored, is_quantized = measure_folder(Path(model_config.model))
        unsent = find_unsent(model, sent, stored, model_config.dtype)
        if not unsent:
            self.counter_before_loading_weights = time.perf_counter()
            return make_placeholders(sent, model_config.dtype)
        text = f"no refit sends {', '.join(unsent[:3])} ({len(unsent)} parameters), which the model's folder has"
        if is_quantized:  # the model was made without the layers that such weights are read into
            raise ValueError(f"{text}, and its quantized weights are never read by engines of a run that trains")
        names = find_read_names(model, stored, model_config.dtype)
        logger.warning("the engine reads %d of %d tensors of the model's folder: %s", len(names), len(stored), text)
        self.counter_before_loading_weights = time.perf_counter()
        return read_tensors(Path(model_config.model), names)


def measure_folder(folder: Path) -> tuple[Shapes, Shapes, bool]:
    """Measure the tensors of a refit and of the folder.

    Returns both by name, and whether the folder's are quantized."""
    # Imported here because workers that read a folder do without the families, which are many modules.
    from megatron_grpo.models.families import measure_tensors
    from megatron_grpo.models.families.reading import read_model_shape
    from megatron_grpo.models.quantized_weights import describe_values, read_quantization
    from megatron_grpo.models.shape import read_config_json
    from megatron_grpo.models.stored_tensors import list_stored_tensors

    stored, quantization = list_stored_tensors(folder), read_quantization(read_config_json(folder / "config.json"))
    if quantization is not None:
        stored = describe_values(stored, quantization)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return measure_tensors(read_model_shape(folder)), shapes, quantization is not None


def find_unsent(model: nn.Module, sent: Shapes, stored: Shapes, dtype: torch.dtype) -> list[str]:
    """Name the parameters and buffers that the folder fills and a refit does not.

    The model is as vLLM makes it, before it loads weights. `sent`, `stored`: tensors of a refit and of the folder.
    """
    remaining = {name: (shape, dtype) for name, shape in stored.items() if name not in sent}
    with _use_plain_loaders(model):
        trace = trace_weights(model, remaining)
        filled = {box.parameter for box in trace.boxes} | trace.unexplained.keys()
        if not filled:
            return []
        # A folder may have the tensors of a refit under other names, such as those of all experts joined.
        trace = trace_weights(model, {name: (shape, dtype) for name, shape in sent.items()})
    counts: Counter[str] = Counter()
    for box in trace.boxes:
        counts[box.parameter] += count_elements(box.layout.parameter)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return sorted(name for name in filled if counts[name] != tensors[name].numel() and name not in trace.unexplained)


def find_read_names(model: nn.Module, stored: Shapes, dtype: torch.dtype) -> list[str]:
    """Name the tensors of a folder that the model's loaders read.

    Those of layers that propose tokens are a hundredth of the folder, which every worker would read whole.
    """
    with _use_plain_loaders(model):
        trace = trace_weights(model, {name: (shape, dtype) for name, shape in stored.items()})
    filling = {box.tensor for box in trace.boxes}
    # Loading that is no copy of boxes does not tell which tensors it reads.
    return [name for name in stored if name in filling or trace.unexplained]


def read_tensors(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Read tensors of a folder by name, file by file."""
    from megatron_grpo.models.stored_tensors import list_stored_tensors

    stored, by_file = list_stored_tensors(folder), defaultdict[Path, list[str]](list)
    for name in names:
        by_file[stored[name].file].append(name)
    for file, inside in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in inside:
                yield name, opened.get_tensor(name)


def make_placeholders(sent: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Make tensors of one number, which take no memory, on the default device."""
    number = torch.full((), PLACEHOLDER, dtype=dtype)
    for name, shape in sent.items():
        yield name, number.expand(shape)


@contextmanager
def _use_plain_loaders(model: nn.Module) -> Iterator[None]:
    """Let parameters that vLLM quantises while it loads have loaders that only load."""
    layers = [layer for layer in model.modules() if get_layerwise_info(layer).can_load()]
    parameters: Iterable[Any] = chain.from_iterable(layer.parameters(recurse=False) for layer in layers)
    loaders = [(parameter, parameter.weight_loader) for parameter in parameters if hasattr(parameter, "weight_loader")]
    try:
        for parameter, _ in loaders:
            parameter.weight_loader = _get_original_loader(parameter)
        yield
    finally:
        for parameter, loader in loaders:
            parameter.weight_loader = loader
