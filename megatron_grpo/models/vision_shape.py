"""How a model takes images: what batches, ranks and engines need to know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainedTower:
    """A vision tower that is trained: the module of a model's folder."""

    folder: str  # whose config.json says what the module is
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Names in the module, with shapes, in the order of the folder."""
    prefix: str  # of their names in the folder


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """How a model takes images: their tokens and their positions."""

    image_token: int  # stands for each token of an image
    placeholders: tuple[int, ...]  # tokens that stand for images or video, which are never sampled
    merge: int  # patches along a side of the square that becomes one token
    rotary_axes: tuple[int, ...]
    """[rotated features / 2]: the position that each frequency turns by: 0 for time, 1 for height, 2 for width."""
    trained: TrainedTower | None = None  # None: the tower is frozen
    levels: int = 0
    """Layers, from the first, to whose outputs further features of images are added (Meng et al. 2024, DeepStack)."""
