"""Objects of vLLM's FP8 kernels, which CUDA graphs have captured, before and after refits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.weight_sync.engine_layers import ModelReload, is_derived
from megatron_grpo.weight_sync.weight_trace import trace_model
from tests.cuda.null.engines import engine_config, loaded_model, refit
from tests.support.engine_state import list_objects, list_state
from tests.support.refit_models import made_up_worker

# Every pair of a form of FP8 and a backend that vLLM builds on the stand-in device; kernels of the other backends are
# compiled when they are made, or are for other GPUs.
BACKENDS: list[dict[str, str]] = [
    *({"quantization": "fp8", "moe_backend": name} for name in ("triton", "marlin")),
    *({"quantization": "fp8_per_block", "moe_backend": name} for name in ("triton", "marlin", "flashinfer_cutlass")),
    {"quantization": "fp8_per_channel", "moe_backend": "cutlass", "linear_backend": "torch"},
    *({"quantization": "fp8", "linear_backend": name} for name in ("cutlass", "marlin", "torch")),
    *({"quantization": "fp8_per_block", "linear_backend": name} for name in ("cutlass", "marlin", "torch", "triton")),
]


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["0"])


@pytest.mark.parametrize("mode", ["reshard", "broadcast"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: " ".join(backend.values()))
def test_captured_tensors_get_the_values_of_a_conversion(
    backend: dict[str, str], mode: str, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models("qwen3_moe")
    config = engine_config(folder, engine_args=dict(backend))
    model, shape = loaded_model(config), read_model_shape(folder)
    layers = [layer for layer in model.modules() if is_derived(layer)]
    objects, tensors = list_objects(layers), list_tensors(model)
    assert any(type(value).__name__ == "FusedMoEKernel" for value in objects.values())
    marked = mark_conversions(layers, monkeypatch)
    for number in (1, 2):
        marked.clear()
        if mode == "reshard":
            with set_current_vllm_config(config), torch.no_grad():
                boxes = trace_model(model, measure_tensors(shape), torch.bfloat16).boxes
            refit(model, config, shape, boxes)
        else:
            reload_model(model, config)
        assert {path: id(value) for path, value in list_objects(layers).items()} == {
            path: id(value) for path, value in objects.items()
        }
        after = list_tensors(model)
        assert {path: tensor.data_ptr() for path, tensor in after.items()} == tensors_at(tensors)
        assert len(marked) == len(layers), f"refit {number} converts each layer once"
        for values in marked.values():
            for first, expected in values:
                assert torch.equal(read_bytes(first), read_bytes(expected))


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors on the device by path; attention makes copies of its scales on the host anew."""
    return {path: value for path, value in list_state(model).items() if isinstance(value, Tensor) and value.is_cuda}


def tensors_at(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {path: tensor.data_ptr() for path, tensor in tensors.items()}


def read_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def mark_conversions(
    layers: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Fill the tensors that a conversion makes with numbers of the test, since kernels do nothing here.

    Returns by layer, for each tensor from before, the one that the last conversion has made in its place.
    """
    marked: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def mark(layer: Any, first: dict[str, Tensor], convert: Callable[[Any], None]) -> None:
        convert(layer)
        pairs = []
        for path, tensor in list_tensors(layer).items():
            if path in first and tensor.data_ptr() != first[path].data_ptr():
                tensor.untyped_storage().copy_(
                    torch.full(
                        (tensor.untyped_storage().nbytes(),), len(pairs) % 251 + 3, dtype=torch.uint8
                    ).untyped_storage()
                )
                pairs.append((first[path], tensor))
        assert pairs
        marked[id(layer)] = pairs

    for layer in layers:
        untyped: Any = layer
        method, first = untyped.quant_method, list_tensors(layer)
        convert = method.process_weights_after_loading
        monkeypatch.setattr(
            method,
            "process_weights_after_loading",
            lambda converted, first=first, convert=convert: mark(converted, first, convert),
        )
    return marked


def reload_model(model: nn.Module, config: Any) -> None:
    """Bring zeros into the model by vLLM's own loaders."""
    sizes = measure_tensors(read_model_shape(Path(config.model_config.model)))
    with set_current_vllm_config(config), torch.no_grad():
        reload = ModelReload(made_up_worker(model))
        reload.begin()
        reload.load((name, torch.zeros(size, dtype=torch.bfloat16, device="cuda")) for name, size in sizes.items())
        reload.finish()
