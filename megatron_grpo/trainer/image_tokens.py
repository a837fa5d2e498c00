"""The tokens of a microbatch's images that one rank embeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.token_batch import TokenBatch, require_field
from megatron_grpo.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Images of a microbatch, and the tokens that a rank embeds.

    Context and sequence parallelism leave a rank some of the tokens of an image.
    """

    images: list[StoredImage]  # of all sequences, in order
    slots: NDArray[np.int64]  # [image tokens of the rank]: index among the tokens that the rank embeds
    features: NDArray[np.int64]  # [image tokens of the rank]: index among the tokens of all images

    @staticmethod
    def locate(batch: TokenBatch, source: NDArray[np.int64], shape: ModelShape) -> ImageTokens:
        """Locate the tokens of a microbatch's images.

        `source`, [tokens that the rank embeds]: index of each token in the flat sequences; -1: padding.
        """
        vision, token_ids = shape.vision, require_field(batch.fields.token_ids).numpy()
        assert vision is not None, "the model takes no images"
        is_image = token_ids == vision.image_token
        number = np.cumsum(is_image) - 1  # of each image's token among those of all images
        slots = np.flatnonzero((source >= 0) & is_image[np.maximum(source, 0)])
        images = [image for stored in batch.images or () for image in stored]
        needed = sum(image.count_tokens(vision) for image in images)
        assert needed == is_image.sum(), f"{needed} tokens of images, {is_image.sum()} placeholders"
        return ImageTokens(images, slots, number[source[slots]])
