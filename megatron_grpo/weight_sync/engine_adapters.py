"""Runs in an engine's worker: puts the policy's adapter into vLLM's slots beside the base model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_grpo.models.adapter_slot import AdapterSlot
from megatron_grpo.weight_sync.engine_layers import ModelReload


def make_loader(worker: Any, source: Mapping[str, Any]) -> ModelReload | AdapterLoad:
    """Make the loader of what a source sends: the model's weights, or an adapter."""
    if "adapter" in source:
        return AdapterLoad(worker, AdapterSlot(**source["adapter"]))
    return ModelReload(worker)


class AdapterLoad:
    """Loads an adapter's whole matrices into a worker's slot.

    The adapter keeps its number, so requests in flight go on with the new matrices, as they do with new weights.
    """

    def __init__(self, worker: Any, slot: AdapterSlot) -> None:
        self._model, self._slot = worker.model_runner.get_model(), slot
        self._dtype = worker.vllm_config.lora_config.lora_dtype
        self._tensors: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a version; matrices that do not come stay as they are."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors |= dict(tensors)

    def finish(self) -> None:
        """Replace the adapter; ValueError: some matrix is not in its place afterwards."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        slot, manager = self._slot, self._model.lora_manager
        settings = {"r": slot.rank, "lora_alpha": slot.alpha, "target_modules": slot.modules}
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            slot.number,
            # Copies, which vLLM multiplies by the adapter's scale in their place.
            {f"base_model.model.{name}": tensor.clone() for name, tensor in self._tensors.items()},
            PEFTHelper.from_dict(settings),
            device=str(next(iter(self._tensors.values())).device),
            dtype=self._dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.remove_adapter(slot.number)
        manager.add_adapter(adapter)
        manager.activate_adapter(slot.number)
        index = manager.lora_index_to_id.index(slot.number)
        faults = [
            name for name, module in manager.modules.items() if not _holds(module, index, adapter.loras.get(name))
        ]
        faults += sorted(adapter.loras.keys() - manager.modules.keys())
        if faults:
            raise ValueError(
                f"vLLM's model does not hold the adapter of {', '.join(faults[:3])} ({len(faults)} layers)"
            )

    def abandon(self) -> None:
        """Keep the previous adapter, which is replaced only as a whole."""


def _holds(module: Any, index: int, weights: Any) -> bool:
    """True if a layer's slot has these matrices.

    `weights` are vLLM's; None: the adapter has none. Of experts, whose slots have an order of their own, only the
    canary says so.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    if weights is None or not isinstance(module, BaseLinearLayerWithLoRA):
        return weights is not None
    for kind, stacked in (("a", module.lora_a_stacked), ("b", module.lora_b_stacked)):
        values = getattr(weights, f"lora_{kind}")
        if module.tp_size > 1:
            values = getattr(module, f"slice_lora_{kind}")(values)
        for slots, matrix in zip(stacked, values if isinstance(values, list) else [values], strict=True):
            if matrix is not None:
                slot = slots[index, 0, : matrix.shape[0], : matrix.shape[1]]
                if not torch.equal(slot, matrix.to(slot)):
                    return False
    return True


@contextmanager
def base_layers(model: nn.Module) -> Iterator[None]:
    """Take the layers with slots out of a model, in the body."""
    manager = getattr(model, "lora_manager", None)
    wrapped: dict[str, Any] = {} if manager is None else dict(manager.modules)
    try:
        for name, module in wrapped.items():
            _replace_layer(model, name, module.base_layer)
            _switch_experts(module, "")
        yield
    finally:
        for name, module in wrapped.items():
            _replace_layer(model, name, module)
            _switch_experts(module, "base_layer.")


def _switch_experts(module: Any, prefix: str) -> None:
    """Switch slots of experts; `prefix` is in the names of their weights, "": off.

    Their kernel reads slots by itself, and loaders have names as vLLM wraps the layer.
    """
    experts = getattr(module.base_layer, "routed_experts", None)
    if experts is None:
        return
    experts.lora_base_layer_prefix = prefix
    if prefix:
        module.set_mapping(module.punica_wrapper)  # the kernel gets the slots
    else:
        module._moe_kernel.fused_experts.set_lora_context(None)


def _replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
