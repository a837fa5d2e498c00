"""The frozen vision tower of a rank: transformers' own module, and the features of images."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.config.errors import RunError
from megatron_grpo.models.families import list_carried
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import Platform
from megatron_grpo.trainer.image_tokens import ImageTokens
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model.packed_sequences import PlacedImages

KEPT_TOKENS = 2**16
"""Most image tokens whose features are kept: those of the samples of a prompt are computed once."""


class VisionTower:
    """The vision part of a model, which is not trained.

    Every rank whose layers take features has all of it, and computes an image alone, so that its features depend
    neither on the layout nor on the images beside it. Those are the ranks of the first pipeline stage, and of others
    with one of the first layers where features enter these too. It is loaded with the first image.
    """

    def __init__(self, settings: RankSettings, platform: Platform) -> None:
        self._shape, self._platform = settings.shape, platform
        self._folder, self._images = Path(settings.folder), Path(settings.images_folder)
        self._dtype = getattr(torch, settings.config.precision)
        self._tower: Any = None
        self._processor: Any = None
        self._features: OrderedDict[str, Tensor] = OrderedDict()

    def compute(self, tokens: ImageTokens) -> PlacedImages:
        """Compute the features of a microbatch's images, at the places of their tokens."""
        features = torch.cat([self._find_features(image) for image in tokens.images])
        move = self._platform.move
        return PlacedImages(move(tokens.slots), features[move(tokens.features)])

    def _find_features(self, image: StoredImage) -> Tensor:
        """Find or compute an image's features: [tokens, 1 + levels, hidden]."""
        features = self._features.pop(image.digest, None)
        if features is None:
            features = self._compute_features(image)
        self._features[image.digest] = features
        while sum(map(len, self._features.values())) > max(KEPT_TOKENS, len(features)):
            self._features.popitem(last=False)
        return features

    @torch.no_grad()
    def _compute_features(self, image: StoredImage) -> Tensor:
        # Imported here: Pillow and transformers' processors take seconds, and only models with images need them.
        from megatron_grpo.models.image_processor import load_image_processor
        from megatron_grpo.models.image_store import open_stored_image

        if self._tower is None:
            self._tower = load_tower(self._folder, self._shape, self._dtype).to(self._platform.device)
            self._processor = load_image_processor(self._folder)
        pixels = self._processor(images=[open_stored_image(self._images, image.digest)], return_tensors="pt")
        grid = pixels["image_grid_thw"]
        if grid.tolist() != [[1, image.rows, image.columns]]:
            text = f"{grid[0, 1]} x {grid[0, 2]} patches, and {image.rows} x {image.columns} when its prompt was made"
            raise RunError(f"the image {image.digest} has {text}; its processor in {self._folder} has changed")
        values = pixels["pixel_values"].to(self._platform.device, self._dtype)
        output = self._tower(values, grid_thw=grid.to(self._platform.device))
        return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=1)


def make_tower(settings: RankSettings, platform: Platform) -> VisionTower | None:
    """Make the tower of a model with images; None: the model takes none."""
    return None if settings.shape.vision is None or not settings.folder else VisionTower(settings, platform)


def load_tower(folder: Path, shape: ModelShape, dtype: torch.dtype) -> Any:
    """Load the vision part of a model's folder, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        kind = type(AutoModelForImageTextToText.from_config(config).model.visual)
    tower = kind._from_config(config.vision_config, dtype=dtype, attn_implementation="sdpa")
    prefixes = list_carried(shape)
    reader = HFFolderReader(folder)
    stored = {}
    for name, tensor in reader.iterate(lambda name: name.startswith(prefixes)):
        stored[next(name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix))] = tensor
    tower.load_state_dict(stored)
    return tower.requires_grad_(False).eval()
