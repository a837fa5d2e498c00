"""Plants the defect named by PLANTED_DEFECT in every process of a run; Python imports this module as it starts."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

MODULES = {
    "megatron_grpo.weight_sync.model_writer": "spoil_writer",
    "megatron_grpo.weight_sync.shard_sender": "spoil_sender",
    "megatron_grpo.trainer.model.packed_sequences": "spoil_packing",
    "megatron_grpo.trainer.rank": "spoil_rank",
    "megatron_grpo.generation.vllm_requests": "spoil_requests",
}
"""Modules that a defect changes after they are loaded, and the function of `faults` that changes them."""


class Planter(importlib.abc.MetaPathFinder):
    """Finds the modules as Python would, and changes them once they are executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in MODULES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_spoil(module: ModuleType) -> None:
            import faults  # here: it imports torch, which most processes that start do not need

            execute(module)
            getattr(faults, MODULES[name])(module, os.environ["PLANTED_DEFECT"])

        spec.loader.exec_module = execute_and_spoil  # type: ignore[method-assign]
        return spec


if os.environ.get("PLANTED_DEFECT"):
    sys.meta_path.insert(0, Planter())
