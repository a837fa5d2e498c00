"""GRPO and PPO post-training on Megatron-Core; `train` starts a run from a script, as the command line does."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Callback", "train"]

_WHERE = {"train": "megatron_grpo.api", "Callback": "megatron_grpo.controller.user_objects"}


def __getattr__(name: str) -> Any:
    """`train` and `Callback`, imported when they are first used."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(_WHERE[name]), name)
