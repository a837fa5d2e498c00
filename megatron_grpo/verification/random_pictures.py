"""Random pictures in the sequences that a vision model is verified with, and its results in transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.models.image_processor import load_image_processor
from megatron_grpo.models.image_store import open_stored_image, store_image
from megatron_grpo.models.vision_shape import VisionShape

_UNITS = ((1, 2), (3, 2), (2, 2), (1, 4), (3, 3))
"""Heights and widths of the pictures, in tokens; a processor may make them larger."""


def add_pictures(batch: TokenBatch, vision: VisionShape, folder: Path, store: Path, seed: int) -> TokenBatch:
    """Put one to four pictures of unlike sizes into every second sequence.

    `folder`: of the model, with its image processor; `store`: where the pictures are written. ValueError: the folder
    has no image processor.
    """
    draw, pictures = np.random.default_rng(seed), _draw_pictures(vision, folder, store, seed)
    plain = next(token for token in range(len(vision.placeholders) + 1) if token not in vision.placeholders)
    by_sequence = {name: value.split(batch.lengths) for name, value in batch.fields.as_dict().items()}
    images: list[Images] = []
    joined: dict[str, list[Tensor]] = {name: [] for name in by_sequence}
    for number in range(len(batch)):
        count = min(1 + number // 2 % 4, batch.lengths[number]) if number % 2 == 0 else 0
        chosen = [next(pictures) for _ in range(count)]
        # With text between them: transformers takes neighbouring placeholders for those of one image.
        positions = np.sort(draw.choice(batch.lengths[number], count, replace=False)) + 1
        images.append(chosen)
        for name, parts in by_sequence.items():
            values = parts[number]
            if name == "token_ids":
                is_placeholder = torch.isin(values, torch.tensor(vision.placeholders))
                values = torch.where(is_placeholder, plain, values)
            filler = float(vision.image_token) if name == "token_ids" else 0.0
            pieces = np.split(values.numpy(), positions)
            for position, image in enumerate(chosen):
                tokens = np.full(image.count_tokens(vision), filler, pieces[position].dtype)
                pieces[position] = np.append(pieces[position], tokens)
            joined[name].append(torch.from_numpy(np.concatenate(pieces)))
    lengths = [len(values) for values in joined["token_ids"]]
    return TokenBatch(lengths, TokenFields(**{name: torch.cat(parts) for name, parts in joined.items()}), images)


def _draw_pictures(vision: VisionShape, folder: Path, store: Path, seed: int) -> Iterator[StoredImage]:
    from PIL import Image

    draw, processor = np.random.default_rng(seed), load_image_processor(folder)
    unit = processor.patch_size * vision.merge
    while True:
        for rows, columns in _UNITS:
            pixels = draw.integers(0, 256, (rows * unit, columns * unit, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, format="PNG")
            digest = store_image(store, file.getvalue())
            grid = processor(images=[open_stored_image(store, digest)], return_tensors="pt")["image_grid_thw"][0]
            yield StoredImage(digest, int(grid[1]), int(grid[2]))


def load_whole_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load a vision model in transformers' plain torch code."""
    from transformers import AutoModelForImageTextToText

    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **options)
    return model.eval()


def make_model_inputs(
    token_ids: Tensor, images: Images, vision: VisionShape, folder: Path, store: Path
) -> dict[str, Tensor]:
    """Make transformers' inputs of a sequence: [1, tokens] and the pixels of its images."""
    inputs = {"input_ids": token_ids[None]}
    if images:
        opened = [open_stored_image(store, image.digest) for image in images]
        pixels = load_image_processor(folder)(images=opened, return_tensors="pt")
        inputs |= {name: pixels[name] for name in ("pixel_values", "image_grid_thw")}
        inputs["mm_token_type_ids"] = (token_ids[None] == vision.image_token).int()
    return inputs
