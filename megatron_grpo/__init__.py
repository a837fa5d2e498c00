"""GRPO and PPO post-training native to Megatron-Core: `train` runs what the command line does, for scripts."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Callback", "train"]


def __getattr__(name: str) -> Any:
    """`train` and `Callback`, imported when they are asked for."""
    if name == "train":
        return importlib.import_module("megatron_grpo.train")
    if name == "Callback":
        return importlib.import_module("megatron_grpo.controller.user_objects").Callback
    raise AttributeError(f"module {__name__} has no attribute {name}")
