"""Images of a sequence as batches carry them: the digest of the content, and the grid of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.models.vision_shape import VisionShape


class StoredImage(NamedTuple):
    """An image of a sequence, whose file is in the run's store.

    Example: 6 x 8 patches, which are 12 tokens where 2 x 2 patches become one
        StoredImage("9f86d081884c7d65", rows=6, columns=8)
    """

    digest: str  # of the file's content: SHA-256, hexadecimal
    rows: int  # patches from top to bottom
    columns: int  # patches from left to right

    def count_tokens(self, vision: VisionShape) -> int:
        return self.rows * self.columns // vision.merge**2


Images = Sequence[StoredImage]


def compute_grid_positions(token_ids: NDArray[np.integer], images: Images, vision: VisionShape) -> NDArray[np.int64]:
    """Compute positions in time, height and width (Wang et al. 2024, Qwen2-VL, section 2.1).

    Text counts on in all three. The tokens of an image have one time, and count its rows and columns from there; what
    follows it goes on behind the longer side.

    Args:
        token_ids: [tokens], of one sequence.
        images: the sequence's images, in order.
        vision: how the model takes images.

    Returns:
        [3, tokens], int64.
    """
    positions = np.empty((3, len(token_ids)), dtype=np.int64)
    placeholders = np.flatnonzero(token_ids == vision.image_token)
    token = position = used = 0
    for image in images:
        rows, columns = image.rows // vision.merge, image.columns // vision.merge
        first = int(placeholders[used])
        used += rows * columns
        positions[:, token:first] = np.arange(first - token) + position
        position += first - token
        token = first + rows * columns
        height, width = np.divmod(np.arange(rows * columns), columns)
        positions[:, first:token] = position + np.stack([np.zeros_like(height), height, width])
        position += max(rows, columns)
    positions[:, token:] = np.arange(len(token_ids) - token) + position
    return positions


def require_placeholders(token_ids: NDArray[np.integer], images: Images, vision: VisionShape) -> None:
    """ValueError: a sequence's placeholders are not those of its images."""
    count = int(np.isin(token_ids, vision.placeholders).sum())  # of videos, too, which nobody has
    needed = sum(image.count_tokens(vision) for image in images)
    if count != needed:
        raise ValueError(f"has {count} placeholder tokens, and its {len(images)} images need {needed}")
