"""State of torch's AdamW in Megatron-Core's distributed optimizer.

Megatron-Core takes it where neither Transformer Engine nor apex is installed, on a CPU and on a GPU. It keeps a step
count for each parameter, and Megatron-Core's code of checkpoints expects the one count of a fused optimizer.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def patch_state_of_adamw() -> None:
    """Let checkpoints have the state of torch's AdamW; idempotent."""
    optimizer_class = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    original_load, original_state = optimizer_class.load_state_dict, optimizer_class.state_dict

    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        for name, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if name != "step":  # comes with the parameter groups
                target.copy_(tensors[name])

    def load(self: Any, state_dict: dict[str, Any]) -> None:
        original_load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def build_state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        if not self.optimizer.state:  # stages without experts have an empty expert optimizer
            groups = [{**group, "step": 0} for group in self.optimizer.param_groups]
            for group in groups:
                del group["params"]
            return {"optimizer": {"param_groups": groups}}
        return original_state(self)

    optimizer_class.state_dict = build_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states
    optimizer_class.load_state_dict = load
