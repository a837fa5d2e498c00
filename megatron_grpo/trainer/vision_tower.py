"""The vision tower of a rank: transformers' own module, features of images, and gradients from those of features."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from megatron_grpo.trainer.model.build import DecoderModel
from megatron_grpo.trainer.model.packed_sequences import PlacedImages
from megatron_grpo.trainer.model.vision_module import build_vision_module

if TYPE_CHECKING:
    from megatron_grpo.trainer.microbatch import MicrobatchMaker

KEPT_TOKENS = 2**16
"""Most image tokens whose features are kept: those of the samples of a prompt are computed once."""


class VisionTower:
    """The vision part of a model: features of images, and its gradients.

    Every rank whose layers take features has all of it, and computes an image alone, so that its features depend
    neither on the layout nor on the images beside it. Those are the ranks of the first pipeline stage, and of others
    with one of the first layers where features enter these too. A frozen one is loaded with the first image.

    One that is trained is a part of the first chunk. The gradient by its weights is linear in that by the features. So
    features are leaves of the graph, in which the gradients of all samples and microbatches of a step add up, and the
    tower goes forward and backward once for each distinct image of the step (`backward`).
    """

    def __init__(self, settings: RankSettings, platform: Platform, module: Any = None) -> None:
        """`module`: of the model, if it is trained; None: that of the folder, frozen."""
        self._shape, self._platform = settings.shape, platform
        self._folder, self._images = Path(settings.folder), Path(settings.images_folder)
        self._dtype = getattr(torch, settings.config.precision)
        self._module, self._is_trained = module, module is not None
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self._leaves: dict[str, tuple[StoredImage, Tensor]] = {}  # features in the graph of a step, by digest

    def compute(self, tokens: ImageTokens) -> PlacedImages:
        """Compute the features of a microbatch's images, at the places of their tokens."""
        features = torch.cat([self._find_features(image) for image in tokens.images])
        move = self._platform.move
        return PlacedImages(move(tokens.slots), features[move(tokens.features)])

    def clear(self) -> None:
        """Forget the features, since the weights have changed."""
        self._features.clear()
        self._leaves.clear()

    def backward(self) -> None:
        """Add a step's gradients to those of the weights; forget the features."""
        for image, leaf in self._leaves.values():
            if leaf.grad is not None:
                with torch.enable_grad():
                    self._run(image).backward(leaf.grad)
        self.clear()

    def _find_features(self, image: StoredImage) -> Tensor:
        """Find or compute an image's features: [tokens, 1 + levels, hidden]."""
        in_graph = self._is_trained and torch.is_grad_enabled()
        if in_graph and image.digest in self._leaves:
            return self._leaves[image.digest][1]
        features = self._features.pop(image.digest, None)
        if features is None:
            with torch.no_grad():
                features = self._run(image)
        self._features[image.digest] = features
        while sum(map(len, self._features.values())) > max(KEPT_TOKENS, len(features)):
            self._features.popitem(last=False)
        if in_graph:
            features = features.detach().requires_grad_()
            self._leaves[image.digest] = image, features
        return features

    def _run(self, image: StoredImage) -> Tensor:
        # Imported here: Pillow and transformers' processors take seconds, and only models with images need them.
        from megatron_grpo.models.image_processor import load_image_processor
        from megatron_grpo.models.image_store import open_stored_image

        if self._module is None:
            self._module = load_tower(self._folder, self._shape, self._dtype).to(self._platform.device)
        processor: Any = load_image_processor(self._folder)
        pixels = processor(images=[open_stored_image(self._images, image.digest)], return_tensors="pt")
        grid = pixels["image_grid_thw"]
        if grid.tolist() != [[1, image.rows, image.columns]]:
            text = f"{grid[0, 1]} x {grid[0, 2]} patches, and {image.rows} x {image.columns} when its prompt was made"
            raise RunError(f"the image {image.digest} has {text}; its processor in {self._folder} has changed")
        values = pixels["pixel_values"].to(self._platform.device, self._dtype)
        output = self._module(values, grid_thw=grid.to(self._platform.device))
        return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=1)


def make_tower(settings: RankSettings, platform: Platform, chunks: Sequence[DecoderModel]) -> VisionTower | None:
    """Make the tower of images; None: no layer here gets any."""
    takes_images = settings.shape.vision is not None and any(chunk.takes_images for chunk in chunks)
    if not (takes_images and settings.images_folder):
        return None
    return VisionTower(settings, platform, chunks[0].vision_tower)


@contextmanager
def use_tower(
    maker: MicrobatchMaker, settings: RankSettings, platform: Platform, chunks: Sequence[DecoderModel]
) -> Iterator[None]:
    """Compute images with the tower of other chunks, if they have their own."""
    tower = maker.tower
    if chunks[0].vision_tower is not None:
        maker.tower = make_tower(settings, platform, chunks)
    try:
        yield
    finally:
        maker.tower = tower


def load_tower(folder: Path, shape: ModelShape, dtype: torch.dtype) -> Any:
    """Load the vision part of a folder, in evaluation mode."""
    tower = build_vision_module(folder, dtype)
    prefixes = list_carried(shape)
    reader = HFFolderReader(folder)
    stored = {}
    for name, tensor in reader.iterate(lambda name: name.startswith(prefixes)):
        stored[next(name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix))] = tensor
    tower.load_state_dict(stored)
    return tower.requires_grad_(False).eval()
