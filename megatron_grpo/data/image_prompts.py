"""Prompts with images: the model's own processor makes the token ids, once, and the images go into the run's store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from megatron_grpo.batch.images import Images, StoredImage, require_placeholders
from megatron_grpo.config.schema import Config
from megatron_grpo.data.chat_messages import read_row_tools
from megatron_grpo.data.image_rows import place_images, read_images, show_images
from megatron_grpo.data.processors import REFERENCE, DatumSpec, Message, TaskDataSpec, apply_prompt_file, find_task
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.image_processor import load_image_processor
from megatron_grpo.models.image_store import decode_image, digest_image, locate_images, store_image
from megatron_grpo.models.vision_shape import VisionShape

if TYPE_CHECKING:
    from PIL.Image import Image


class TooManyImagesError(ValueError):
    """A sequence has more or larger images than allowed."""


@dataclass(frozen=True, kw_only=True)
class RunImages:
    """How a run takes images, and the limits of a sequence."""

    store: Path
    model: Path
    vision: VisionShape
    max_images: int
    max_tokens: int  # of all images together


def make_run_images(config: Config, model: Path, store: Path | None = None) -> RunImages | None:
    """Make the settings of images; None: there are none.

    `model`: folder of the model; `store`: of the images; None: that of the run.
    """
    if config.data.image_key is None:
        return None
    vision = read_model_shape(model).vision
    assert vision is not None, "checks refuse images for a model that does not see"
    return RunImages(
        store=store or locate_images(config.run_dir),
        model=model,
        vision=vision,
        max_images=config.data.max_images,
        max_tokens=config.data.max_image_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class ImageSource(RunImages):
    """Where a set's images come from, and how the run takes them."""

    column: str
    folder: Path  # of paths that are not absolute: that of the set's file


@lru_cache(maxsize=2)
def load_processor(model: Path) -> Any:
    """Load the processor of a folder; ValueError: it has none."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{model} has no processor that can be loaded: {reason}") from None
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"{model} has a processor without an image processor (preprocessor_config.json)")
    return processor


@dataclass(frozen=True)
class ImagePromptProcessor:
    """Makes prompts of rows with images (`DataProcessor`)."""

    source: ImageSource

    def __call__(
        self, row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
    ) -> DatumSpec:
        """Make the prompt of a row, and store its images.

        ValueError: an image cannot be read, or the prompt's places and images differ, or its images have too many
        tokens; or as `math_data_processor`.
        """
        source = self.source
        try:
            prompt = apply_prompt_file(row[spec.prompt_key], row, spec, idx)
            messages, contents = place_images(prompt, read_images(row.get(source.column), source.folder), source.folder)
            text = self._render(messages, row, spec, tokenizer)
            token_ids, images = self._encode(text, contents)
        except (TemplateError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(f"row {idx}: the tokenizer's chat template refuses the prompt: {error}") from error
        except ValueError as error:
            raise ValueError(f"row {idx}: {error}") from None
        apart = (spec.prompt_key, source.column)  # environments get no images
        extra = {key: value for key, value in row.items() if key not in apart}
        if spec.answer_key is not None:
            extra = {"answer": row[spec.answer_key], **extra, REFERENCE: str(row[spec.answer_key])}
        if len(token_ids) > max_seq_length and spec.long_prompts == "error":
            text = f"has {len(token_ids)} tokens, more than data.max_input_seq_length={max_seq_length}"
            raise ValueError(f"row {idx}: the prompt {text} (data.long_prompts=error)")
        return DatumSpec(
            message_log=[Message(role="user", content=text, token_ids=token_ids)],
            length=len(token_ids),
            extra_env_info=extra,
            loss_multiplier=1.0 if len(token_ids) <= max_seq_length else 0.0,
            idx=idx,
            task_name=find_task(row, spec.task_name),
            prompt=show_images(messages),
            images=images,
        )

    @staticmethod
    def _render(messages: list[dict[str, Any]], row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any) -> str:
        renderer = PromptRenderer(tokenizer, replace(spec, takes_images=True))
        if not renderer.has_template:
            raise ValueError("the tokenizer has no chat template, which says where images stand")
        return renderer.render_first_turn(messages, read_row_tools(row))

    def _encode(self, text: str, contents: list[bytes]) -> tuple[list[int], list[StoredImage]]:
        """Encode a rendered prompt as the model's processor does."""
        source, processor = self.source, load_processor(self.source.model)
        if not contents:
            token_ids = np.asarray(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
            require_placeholders(token_ids, [], source.vision)
            return token_ids.tolist(), []
        decoded = decode_images(contents)
        count = text.count(processor.image_token)
        if count != len(contents):
            raise ValueError(f"has {len(contents)} images, and the rendered prompt {count} x {processor.image_token}")
        inputs = processor(text=[text], images=decoded, add_special_tokens=False)
        token_ids = np.asarray(inputs["input_ids"][0])
        images = store_images(contents, inputs["image_grid_thw"], source)
        require_placeholders(token_ids, images, source.vision)
        return token_ids.tolist(), images


def add_images(contents: Sequence[bytes], run: RunImages, earlier: Images = ()) -> list[StoredImage]:
    """Store further images of a sequence.

    `earlier`: images that the sequence has already. TooManyImagesError: with these it would have too many, of which
    none is stored. ValueError: one cannot be decoded, or is not of a form that the model takes.
    """
    require_few_images(len(earlier) + len(contents), run)  # before any is decoded
    images = []
    for number, content in enumerate(contents, start=1):
        try:
            images.append(measure_image(content, run))
        except ValueError as error:
            raise ValueError(f"image {number} {error}") from None
    require_few_tokens([*earlier, *images], run)
    for content in contents:
        store_image(run.store, content)
    return images


def measure_image(content: bytes, run: RunImages) -> StoredImage:
    """Divide an image into patches as the model does.

    ValueError: it cannot be decoded, or is not of a form that the model takes.
    """
    grid = load_image_processor(run.model)(images=[decode_image(content)], return_tensors="pt")["image_grid_thw"][0]
    return StoredImage(digest_image(content), int(grid[1]), int(grid[2]))


def require_few_images(count: int, run: RunImages) -> None:
    """TooManyImagesError: a sequence would have too many images."""
    if count > run.max_images:
        raise TooManyImagesError(f"has {count} images, more than data.max_images={run.max_images}")


def require_few_tokens(images: Images, run: RunImages) -> None:
    """TooManyImagesError: a sequence's images have too many tokens."""
    count = sum(image.count_tokens(run.vision) for image in images)
    if count > run.max_tokens:
        text = f"has images of {count} tokens, more than data.max_image_tokens={run.max_tokens}"
        raise TooManyImagesError(f"{text}; make them smaller, or raise the limit")


def decode_images(contents: Sequence[bytes]) -> list[Image]:
    """Decode images of a sequence; ValueError: one cannot be decoded."""
    decoded = []
    for number, content in enumerate(contents, start=1):
        try:
            decoded.append(decode_image(content))
        except ValueError as error:
            raise ValueError(f"image {number} {error}") from None
    return decoded


def store_images(contents: Sequence[bytes], grids: Any, run: RunImages, earlier: Images = ()) -> list[StoredImage]:
    """Store images of a sequence; TooManyImagesError: they have too many tokens.

    `grids`, [images, 3]: patches of each in time, height and width; `earlier`: images that the sequence has already.
    """
    pairs = zip(contents, np.asarray(grids).tolist(), strict=True)
    images = [StoredImage(digest_image(content), rows, columns) for content, (_, rows, columns) in pairs]
    require_few_tokens([*earlier, *images], run)
    for content in contents:
        store_image(run.store, content)
    return images


def fill_places(token_ids: Sequence[int] | NDArray[np.integer], images: Images, run: RunImages | None) -> list[int]:
    """Repeat a text's placeholders for the tokens of its images.

    `run`: None: it takes no images. ValueError: there are more or fewer placeholders than images.
    """
    if run is None:
        return list(token_ids)
    count = int(np.isin(token_ids, run.vision.placeholders).sum())  # of videos, too, which nobody has
    if count > len(images):
        raise ValueError("its text has the placeholder of an image, and there is no image for it")
    if count < len(images):
        raise ValueError(f"the chat template writes {count} places for its {len(images)} images")
    return list(expand_placeholders(list(token_ids), iter(images), run.vision))


def expand_placeholders(token_ids: Sequence[int], images: Iterator[StoredImage], vision: VisionShape) -> Iterator[int]:
    """Repeat each placeholder for the tokens of its image."""
    for token in token_ids:
        count = next(images).count_tokens(vision) if token == vision.image_token else 1
        yield from [token] * count
