"""What a model family is: how its config.json is read, its table of weights, its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models; a file in models/families defines each."""

    name: str
    architecture: str
    """Name of the language model's class in config.json (`architectures`)."""
    read: Callable[[dict[str, Any]], ModelShape]
    """Sizes from the contents of a config.json; ValueError for an option without support."""
    entries: Callable[[ModelShape], tuple[WeightEntry, ...]]
    """The weight map of a model, in the order of export."""
    forward_flops: Callable[[ModelShape, Sequence[int]], float]
    """Floating-point operations of a forward pass over sequences of these lengths."""
    reward_prefix: str | None = None
    """How names of its reward models' classes begin, before "For"; None: as that of the language model does."""
