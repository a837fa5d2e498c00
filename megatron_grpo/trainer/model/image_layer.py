"""Layers to whose outputs features of images are added."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.trainer.model.experts import DecoderLayer
from megatron_grpo.trainer.model.packed_sequences import PackedSequences


class ImageLayer(DecoderLayer):
    """Adds its level of features at the tokens of images.

    Source: DeepStack (Meng et al. 2024).
    """

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **keywords: Any) -> Any:
        hidden, *rest = super().forward(*args, packed_seq_params=packed_seq_params, **keywords)
        if isinstance(packed_seq_params, PackedSequences) and packed_seq_params.images is not None:
            images = packed_seq_params.images
            features = images.features[:, self.layer_number, None]  # layers are numbered from 1, as levels are
            hidden = hidden.index_add(0, images.slots, features.type_as(hidden))
        return hidden, *rest
