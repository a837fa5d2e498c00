"""The parts of a model family: reading its config.json and its weight map.

A family is a `Family(...)` at the end of a file in this folder, alone or with its relatives, listed in `_ALL` of
`families`. docs/extending.md shows two and lists the other places that a family touches. It gives:

- `read`: config.json to `ModelShape`. Families with Llama's options start from `llama.read_dense` and `replace` what
  differs; an option that the Megatron model here cannot compute raises ValueError with the key.
- `tables`: a row for each Megatron parameter of a layer; those of other families can be taken.
  `families.build_weight_map` adds the rows outside layers.

The table is enough for loading, export and refits: what vLLM makes of the tensors is traced from its own loaders. A
layer that Megatron-Core's layer spec does not build yet belongs to `trainer/model/layer_spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    """A vision model whose text part is a family's model."""

    architecture: str
    model_type: str
    parts: tuple[str, ...]
    """Beginnings of the names of its other tensors, with or without "model." before them; an export copies them."""
    text_prefix: str = "model.language_model."
    """Prefix of the text part's names in released folders; others may have "language_model." or this one."""
    has_tied_head: bool = False
    """Value of `tie_word_embeddings` in transformers where config.json has none."""
    text_model_type: str | None = None
    """`model_type` of the text part; None: that of the family's own models."""
    packs_experts: bool = False
    """Whether released folders have all experts of a layer in one tensor, where the family's own models have not."""
    is_flat: bool = False
    """Whether released folders have the text part's sizes and names as a model of text alone has them."""
    images: ImageForm | None = None
    """How its text part takes images; None: it is trained on text alone."""


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """How the text part of a family's vision models takes images.

    Features take the place of embeddings; a vision_config with `deepstack_visual_indexes` adds further ones to the
    outputs of the first layers.
    """

    placeholders: tuple[str, ...]
    """Keys of config.json with the tokens that stand for images and video; the first is that of images."""
    defaults: Mapping[str, Any]
    """transformers' values of keys that the text part lacks, and of those above."""
    takes_turns: bool = False
    """Whether frequencies of a head turn by time, height and width in turns; else each has a section of them."""
    levels: tuple[int, ...] = ()
    """transformers' value of `deepstack_visual_indexes`; empty: the family has no such key."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models, defined by a file in this folder."""

    name: str
    architecture: str  # name of the language model's class in config.json (`architectures`)
    read: Callable[[dict[str, Any]], ModelShape]
    """Sizes from the contents of a config.json; ValueError for an option without support."""
    tables: tuple[str, ...]  # rows of the layers' weights (`weight_map.map_rows`), in the order of export
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of Hugging Face's names, in these tables and outside layers, with those that the family has instead."""
    model_type: str | None = None
    """`model_type` in config.json, by which transformers chooses its class; None: the family's name."""
    other_model_types: tuple[str, ...] = ()
    """Values of `model_type` that vLLM takes for it too, and transformers only with code of the model."""
    has_further_predictions: bool = False
    """Whether folders may have further layers, behind the last or as "mtp.", which predict further tokens (MTP). They
    are not trained; an export copies them."""
    proposes_tokens: bool = False
    """Whether the installed vLLM can propose tokens with these layers."""
    vision: VisionModel | None = None
    """Models that have this one as their text part; None: there are none."""
    reward_prefix: str | None = None
    """Prefix, before "For", of the class names of the family's reward models; None: the language model's."""
    has_reward_models: bool = True
    """Whether transformers has a class for the family's reward models (ForSequenceClassification)."""

    def rename(self, name: str) -> str:
        """Replace the parts of a tensor's name that the family has otherwise."""
        for part, replacement in self.renamed.items():
            name = name.replace(part, replacement)
        return name

    def has_architecture(self, architecture: str, is_reward_model: bool) -> bool:
        """Whether the name of a class in config.json is the family's."""
        if not is_reward_model:
            return architecture == self.architecture
        return architecture.split("For")[0] == self.reward_name

    @property
    def reward_name(self) -> str:
        """Beginning of the class names of reward models."""
        return self.reward_prefix or self.architecture.removesuffix("ForCausalLM")
