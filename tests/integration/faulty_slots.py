"""A worker of vLLM whose slots for adapters go wrong when a test says so, after every message has come intact."""

from typing import Any

from megatron_grpo.weight_sync import engine_adapters
from megatron_grpo.weight_sync.engine_worker import RefitWorker

HOLDS = engine_adapters._holds
LAYER = "model.layers.0.self_attn.qkv_proj"


class FaultySlots(RefitWorker):
    """The worker extension of the engines of test_adapter_refit.py."""

    def plant(self, fault: str) -> None:
        """Let the following refits go wrong, or "none".

        "unchanged": the slot of one layer keeps its matrices; "unchecked": this is not noticed in the worker; "unused":
        requests are computed without adapters.
        """
        manager = self.model_runner.get_model().lora_manager
        for name, module in manager.modules.items():
            vars(module).pop("set_lora", None)
            if fault in ("unchanged", "unchecked") and name == LAYER:
                vars(module)["set_lora"] = lambda *_: None
            if fault == "unused":
                vars(module)["set_lora"] = lambda index, _a, _b, layer=module: layer.reset_lora(index)

        def holds(module: Any, index: int, weights: Any) -> bool:
            return fault in ("unchecked", "unused") or HOLDS(module, index, weights)

        engine_adapters._holds = holds
