"""What a script hands to a run as objects, where a command line can only name things."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.run.callbacks import Callback


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Nothing, for a run of the command line."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By their entry in reward_funcs, functions that are not imported."""
    tokenizer: Any = None
    """Tokenizer of the prompts; None: that of the model's folder."""
    callbacks: Sequence[Callback] = ()
