"""The parts of a model family: reading its config.json and its weight map.

A family is a `Family(...)` at the end of a file in this folder, alone or with its relatives, listed in `_ALL` of
`families`. docs/extending.md lists the other places that a family touches. It gives:

- `read`: config.json to `ModelShape`. Families with Llama's options start from `llama.read_dense` and `replace` what
  differs; an option that the Megatron model here cannot compute raises ValueError with the key.
- `layers`: the table, one `WeightEntry` for each Megatron parameter of a layer; `families.build_weight_map` adds those
  outside layers. Tables of other families are tuples that can be joined: `ATTENTION + MLP`.

The table is enough for loading, export, the broadcast and file refits. The reshard refit also needs vLLM's names of
parameters (`weight_layouts.find_destinations`), which differ from those of Hugging Face only for joined matrices and
experts. A layer that Megatron-Core's layer spec does not build yet belongs to `trainer/model/layer_spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models, defined by a file in this folder."""

    name: str
    architecture: str  # name of the language model's class in config.json (`architectures`)
    read: Callable[[dict[str, Any]], ModelShape]
    """Sizes from the contents of a config.json; ValueError for an option without support."""
    layers: Callable[[ModelShape], tuple[WeightEntry, ...]]  # in the order of export
    model_type: str | None = None
    """`model_type` in config.json, by which transformers chooses its class; None: the family's name."""
    reward_prefix: str | None = None
    """Prefix, before "For", of the class names of the family's reward models; None: the language model's."""
