"""Tokens of what an environment says and shows, as the policy's model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.cluster.limited_calls import TEXT_BYTES, limit_memory
from megatron_grpo.config.errors import ResponseError
from megatron_grpo.config.outside_text import clean_json
from megatron_grpo.data.image_prompts import RunImages, TooManyImagesError, add_images, fill_places
from megatron_grpo.data.image_rows import take_images
from megatron_grpo.data.prompt_renderer import PromptRenderer


@dataclass(frozen=True)
class ObservationEncoder:
    """Encodes the messages of one task's environment."""

    renderer: PromptRenderer
    images: RunImages | None  # None: the run takes no images

    def encode(
        self, messages: Sequence[Mapping[str, Any]], last_token: int, earlier: Images
    ) -> tuple[NDArray[np.int32], list[StoredImage]]:
        """Encode messages after a response, and store their images.

        Args:
            messages: of the environment; the parts of their contents may hold images.
            last_token: of the response.
            earlier: images of the conversation so far.

        Returns:
            The tokens, [tokens], with a placeholder for each token of an image, and the images in order.

        Raises:
            TooManyImagesError: the conversation would have more images than the run takes, or larger ones.
            ResponseError: an image cannot be read or decoded, or has no place.
        """
        try:
            texts, contents = take_images(messages, Path.cwd())
            if contents and self.images is None:
                raise ValueError("shows an image, and data.image_key says that there are none; set it")
            images = [] if self.images is None else add_images(contents, self.images, earlier)
        except TooManyImagesError:
            raise
        except ValueError as error:
            raise ResponseError(f"its turn {error}") from None
        texts = clean_json(texts)
        with limit_memory(TEXT_BYTES):  # the texts are in part the model's
            token_ids = self.renderer.encode_later_turn(texts, last_token)
        return fill_turn(token_ids, images, self.images), images


def fill_turn(
    token_ids: Sequence[int] | NDArray[np.integer], images: Images, run: RunImages | None
) -> NDArray[np.int32]:
    """Repeat a turn's placeholders; ResponseError about their number."""
    try:
        return np.array(fill_places(token_ids, images, run), dtype=np.int32)
    except ValueError as error:
        raise ResponseError(str(error)) from None
