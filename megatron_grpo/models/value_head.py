"""The value model's weights: the backbone of its family and a score of one number, as reward models have."""

from __future__ import annotations

from dataclasses import replace

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import HFTensor, WeightEntry

OUTPUT_LAYER = "output_layer.weight"
"""What the head stands in the place of."""
_BIAS = WeightEntry(("output_layer.bias",), (HFTensor("score.bias", ("score",)),), axis=None, zero_if_absent=True)
"""ForTokenClassification has one, ForSequenceClassification has not."""


def with_value_head(entries: tuple[WeightEntry, ...], shape: ModelShape) -> tuple[WeightEntry, ...]:
    """A family's table without its output layer and with the value head."""
    weight = WeightEntry(
        (OUTPUT_LAYER,),
        (HFTensor("score.weight", ("score", "hidden")),),
        axis=None,
        zero_if_absent=shape.value_head == "fresh",
    )
    return (*(entry for entry in entries if entry.megatron != (OUTPUT_LAYER,)), weight, _BIAS)


def as_value_model(shape: ModelShape) -> ModelShape:
    """The shape of a value model that starts from this model: a reward model's score is its head, else that is new.

    Its output layer is the head, so nothing is tied to the embedding.
    """
    return replace(shape, tied_embeddings=False, value_head=shape.value_head or "fresh")
